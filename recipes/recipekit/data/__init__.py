"""Rows in one global order: from files and the hub to micro-batches.

The words for "some of the data", in the order of the way:

    corpus  part 0 (a file)           part 1 (a file)    source.py: read from any row of any group
            group 0      group 1      group 0
            row row row  row row row  row row row        formats.py: lines, records, runs of text
                |            |            |              encode.py: documents become tokens
            [ chunk ][c] [  chunk   ] [ chunk ][c]       chunks.py: kept on disk, shared by a host
                |                                        parts and groups in an order per epoch
            [    block 0    ][    block 1    ] ...       blocks.py: the range of packing and shuffle
                |
            |piece |piece|piece |pad|  row 0             packing.py: rows of seq_len tokens,
            |piece              |piece|  row 1                       tiled by pieces
                |
    step    slot 0  slot 1  slot 2  slot 3               lanes.py: rows of all corpora dealt to the
            lanes of dp rank 0      lanes of dp rank 1             global batch

    part      a file, a run of bytes of a text file, some small text files together, or a shard that
              `datasets` streams
    group     a Parquet row group, or a shard of a streamed part; every other part is one group
    row       of a group: a line, a record, or a span of text; of a batch: seq_len tokens
    span      the lines of a file that begin in a run of its bytes (`Span`)
    document  a text or a chat. A row holds one document, or no document if it is empty, or several
              where a long text is cut or `builtin` has chats
    chunk     the documents of some hundred rows of a group as tokens (`Chunk`); the chunks do not
              depend on the number of ranks
    block     documents with the tokens of some hundred packed rows, and their packing (`Block`);
              may end within a chunk
    piece     a part of a packed row: a document, seq_len tokens or the rest of a longer document,
              or padding
    run       rows of one block that fill neighbouring slots (`Run`)
    slot      the number of a row in the global batch of a step, 0 to global_batch - 1
    lane      a slot over all steps; a data-parallel rank owns neighbouring lanes
    place     the document at which a block begins, as a few integers (`Place`), kept in a
              checkpoint
    domain    one corpus of a mixture, with its share of the tokens (`Domain`)
    sample    a row that is no text, of a task whose rows are not packed: it goes the same way,
              without tokens and packing (samples.py)

Begin with stream.py. A micro-batch does not depend on the number of ranks: each rank follows the
dealing of all rows, and builds the rows of its own lanes.
"""
