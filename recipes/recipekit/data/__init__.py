"""The data pipeline: rows in one global order, from files and the hub to micro-batches.

The units of data, in the order in which the pipeline produces them:

    corpus  part 0 (a file)           part 1 (a file)    source.py: read from any row of any group
            group 0      group 1      group 0
            row row row  row row row  row row row        formats.py: lines, records, runs of text
                |            |            |              encode.py: documents become tokens
            [ chunk ][c] [  chunk   ] [ chunk ][c]       chunks.py: stored on disk, shared by a host
                |                                        parts and groups shuffled for each epoch
            [    block 0    ][    block 1    ] ...       blocks.py: unit of packing and shuffling
                |
            |segment|segment|segment |pad| row 0         packing.py: rows of seq_len tokens,
            |segment            |segment | row 1                     filled with segments
                |
    step    slot 0  slot 1  slot 2  slot 3               batching.py: rows of all corpora dealt
            slots of dp rank 0      slots of dp rank 1             to the global batch

    part      a file, a byte range of a text file, several small text files, or a shard that
              `datasets` streams
    group     a Parquet row group, or a shard of a streamed part; every other part is one group
    row       within a group: a line, a record, or a span of text; within a batch: seq_len tokens
    span      the lines of a file that begin within a byte range (`ByteSpan`)
    document  a string or a chat. A row contains one document, no document if the row is empty, or
              several documents if a long text is split or if the data set is `builtin` with chats
    chunk     the documents of a few hundred rows of a group, as tokens (`Chunk`); chunks do not
              depend on the number of ranks
    block     documents with the tokens of a few hundred packed rows, and the packing of these
              documents (`PackedBlock`); a block may end within a chunk
    segment   a part of a packed row: a document, seq_len tokens of a longer document, the
              remainder of a longer document, or padding
    run       consecutive rows of one block that fill adjacent slots (`RowRun`)
    slot      the index of a row in a step's global batch, 0 to global_batch - 1; each
              data-parallel rank owns adjacent slots
    place     the document at which a block begins, stored in a checkpoint as a few integers
              (`StreamPosition`)
    domain    one corpus of a mixture, with the corpus's share of the tokens (`Domain`)
    sample    a row for a task that does not pack rows, such as an image. Samples follow the same
              path, but without tokens and packing (samples.py)

Start reading with stream.py. A micro-batch does not depend on the number of ranks, because each
rank follows the dealing of all rows, and builds only the rows in its slots.
"""
