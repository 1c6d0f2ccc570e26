"""The data settings of a recipe, and the sizes for reading, packing and shuffling."""

import dataclasses
from dataclasses import dataclass

from ..spec.recipe import Recipe
from ..spec.schedules import LeaveOut, Ramp, leave_out_of, ramp_of
from ..spec.task import Documents
from ..spec.task_specs import TASKS


@dataclass(frozen=True)
class Sizes:
    """Sizes for reading, packing and shuffling.

    Runs must use the defaults, because the order of the rows depends on most of these sizes. Tests
    use smaller sizes.
    """

    read_rows: int = 64  # text rows that are read from a file at a time
    part_bytes: int = 1 << 20  # size of a part of a text file, which is split at line ends
    chunk_rows: int = 256  # maximum rows of a chunk
    chunk_characters: int = 1 << 20  # a chunk also ends when it reaches this many characters
    # a block, the unit of packing and shuffling, contains the tokens of this many rows
    block_rows: int = 512
    block_tokens: tuple[int, int] = (1 << 20, 1 << 22)  # within this minimum and maximum
    block_samples: int = 4096  # maximum samples in a block of samples that are not packed
    block_bytes: int = 1 << 28  # such a block also ends when it reaches this many bytes of memory
    # number of consecutive documents without a target after which the data are rejected
    barren_documents: int = 10_000
    # number of characters above which the run reports that it tokenizes a long text
    long_text: int = 8_000_000
    # by default, tokens are stored if the free disk space is at least this many times the size of
    # the corpus
    times_free: int = 10

    def tokens_of_block(self, seq_len: int) -> int:
        """Return the number of tokens in a block.

        A block contains the tokens of at least 32 rows, so that long rows are packed well.
        """
        least, most = self.block_tokens
        return max(min(max(self.block_rows * seq_len, least), most), 32 * seq_len)


@dataclass(frozen=True)
class Request:
    """The data that a run reads, how the data are read, and the batches that are made from them.

    Fields have the same names, meanings and defaults as in `Recipe`, except the additional fields
    `sizes`, `tiny`, `day` and `documents`.
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
    leave_out: str = Recipe.leave_out
    eval_every: int = Recipe.eval_every
    eval_rows: int = Recipe.eval_rows
    seed: int = Recipe.seed
    sizes: Sizes = Sizes()
    tiny: bool = False  # True for a trial run
    # ISO date that chat templates write as today's date, fixed when the run first starts; "" means
    # the day of rendering
    day: str = ""
    documents: Documents | None = None  # of the task

    @property
    def ramp(self) -> Ramp:
        """The number of rows in each step."""
        return ramp_of(self.global_batch, self.batch_ramp)

    @property
    def left_out(self) -> LeaveOut:
        """The global batches that the stream passes over."""
        return leave_out_of(self.leave_out)

    @property
    def chats(self) -> bool:
        """True if a document is a chat instead of a string."""
        return TASKS[self.task].chats

    @property
    def masked(self) -> bool:
        """True if some tokens are masked and the model predicts these tokens."""
        return TASKS[self.task].masked

    @property
    def bidirectional(self) -> bool:
        """Return True if attention must know where the documents in a row begin."""
        return TASKS[self.task].bidirectional

    @property
    def fields(self) -> tuple[str, ...]:
        """The recipe fields that contain column names, except empty optional fields."""
        facts = TASKS[self.task]
        return tuple(
            name for name in facts.columns if name != facts.optional_column or getattr(self, name)
        )

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are read from a row."""
        return tuple(getattr(self, name) for name in self.fields)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of a sample's values, which do not depend on the column names.

        The tuple is empty if a document is the value of a single column.
        """
        return tuple(name.removesuffix("_field") for name in self.fields) if self.as_rows else ()

    @property
    def as_rows(self) -> bool:
        """True if a document is a dictionary of columns instead of a single column's value."""
        return TASKS[self.task].reads_rows

    @property
    def skip(self) -> bool:
        """True if unreadable rows are counted instead of causing a config error."""
        return self.bad_rows == "skip"


def request_from_recipe(recipe: Recipe) -> Request:
    """Return a request with a recipe's data settings."""
    return Request(
        **{
            item.name: getattr(recipe, item.name)
            for item in dataclasses.fields(Request)
            if item.name in Recipe.__dataclass_fields__
        }
    )
