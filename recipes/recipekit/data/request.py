"""What a run asks of its data: the values of a recipe that reading, packing and dealing need, and
the sizes they work in.
"""

import dataclasses
from dataclasses import dataclass

from ..spec.phases import Ramp, ramp_of
from ..spec.recipe import Recipe
from ..spec.task_specs import SAMPLES, TASKS


@dataclass(frozen=True)
class Sizes:
    """Says how much is read, packed and shuffled at a time.

    The order of the rows depends on most sizes, so runs have the defaults; tests have smaller ones.
    """

    read_rows: int = 64  # rows of text taken from a file at a time
    part_bytes: int = 1 << 20  # text files are cut, at line ends, into parts of this size
    chunk_rows: int = 256  # a chunk ends at so many rows
    chunk_characters: int = 1 << 20  # or at so many characters, whichever comes first
    # a block, the range of packing and shuffle, has the tokens of so many rows,
    block_rows: int = 512
    block_tokens: tuple[int, int] = (1 << 20, 1 << 22)  # but at least and at most so many
    block_samples: int = 4096  # a block of samples that are not packed has so many,
    block_bytes: int = 1 << 28  # or those that take so much memory, whichever comes first
    # so many documents in a row without a target mean that there is none
    barren_documents: int = 10_000
    # characters whose tokens take so long that the run says what it does
    long_text: int = 8_000_000
    # tokens are kept by themselves where the disk has so many times the bytes of the corpus free
    times_free: int = 10

    def tokens_of_block(self, seq_len: int) -> int:
        """Computes the tokens of a block: those of 32 rows at least, so that long rows are packed
        well, too.
        """
        least, most = self.block_tokens
        return max(min(max(self.block_rows * seq_len, least), most), 32 * seq_len)


@dataclass(frozen=True)
class Request:
    """Says which data a run reads, how, and into what batches.

    Fields have the names, meanings and defaults of `Recipe`; `sizes`, `tiny` and `day` are added.
    """

    model: str = Recipe.model
    model_revision: str = Recipe.model_revision
    tokenizer: str = Recipe.tokenizer
    init: str = Recipe.init
    dataset: str = Recipe.dataset
    subset: str = Recipe.subset
    split: str = Recipe.split
    dataset_revision: str = Recipe.dataset_revision
    text_field: str = Recipe.text_field
    messages_field: str = Recipe.messages_field
    prompt_field: str = Recipe.prompt_field
    chosen_field: str = Recipe.chosen_field
    rejected_field: str = Recipe.rejected_field
    image_field: str = Recipe.image_field
    label_field: str = Recipe.label_field
    augment: str = Recipe.augment
    threads: int = Recipe.threads
    task: str = Recipe.task
    bad_rows: str = Recipe.bad_rows
    retry_s: float = Recipe.retry_s
    mask_rate: float = Recipe.mask_rate
    whole_words: bool = Recipe.whole_words
    token_cache: str = Recipe.token_cache
    seq_len: int = Recipe.seq_len
    pp: int = Recipe.pp
    micro_batch: int = Recipe.micro_batch
    global_batch: int = Recipe.global_batch
    batch_ramp: str = Recipe.batch_ramp
    eval_every: int = Recipe.eval_every
    eval_rows: int = Recipe.eval_rows
    seed: int = Recipe.seed
    sizes: Sizes = Sizes()
    tiny: bool = False  # a trial
    # ISO date that chat templates write as today's: the run's first start; "": the day of rendering
    day: str = ""

    @property
    def ramp(self) -> Ramp:
        """Says how many rows each step has."""
        return ramp_of(self.global_batch, self.batch_ramp)

    @property
    def chats(self) -> bool:
        """Says whether a document is a chat, not a text."""
        return TASKS[self.task].chats

    @property
    def masked(self) -> bool:
        """Says whether some of the tokens are hidden, and the model learns these."""
        return TASKS[self.task].masked

    @property
    def fields(self) -> tuple[str, ...]:
        """Names the fields of the columns that are read: all of the task's, but for an optional one
        that is left empty.
        """
        facts = TASKS[self.task]
        return tuple(
            name for name in facts.columns if name != facts.optional or getattr(self, name)
        )

    @property
    def columns(self) -> tuple[str, ...]:
        """Names the columns that are read of a row."""
        return tuple(getattr(self, name) for name in self.fields)

    @property
    def names(self) -> tuple[str, ...]:
        """Names the values of a sample, whatever their columns are called; none if a document is no
        sample.
        """
        return tuple(name.removesuffix("_field") for name in self.fields) if self.as_rows else ()

    @property
    def as_rows(self) -> bool:
        """Says whether a row of the data set is a row of a micro-batch, and not a document to be
        packed.
        """
        return TASKS[self.task].rows == SAMPLES

    @property
    def skip(self) -> bool:
        """Says whether rows that cannot be read are counted, not refused."""
        return self.bad_rows == "skip"


def request_of(recipe: Recipe) -> Request:
    """Takes from a recipe what it asks of its data."""
    return Request(
        **{
            item.name: getattr(recipe, item.name)
            for item in dataclasses.fields(Request)
            if item.name in Recipe.__dataclass_fields__
        }
    )
