"""Sections about the data stages: from the workbook to a dataset."""

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from qinglan.config.base import (
    EMBEDDED,
    Count,
    LocalPath,
    Pattern,
    Positive,
    SecretName,
    Section,
    Share,
)
from qinglan.config.site import Endpoint
from qinglan.text import ARMS


class Columns(Section):
    """Column names in the workbook's header row; a column whose name is empty is not read."""

    query: Annotated[str, Field(min_length=1)] = "问题"
    profile: str = "用户画像"
    history: str = "历史摘要"
    gold: str = "标准文档"
    """Id of the document that answers the question, or of several of which each does, as `d1; d2`
    (optional column)."""
    split: str = "划分"
    """train, dev or test (optional column); rows without it are split by `dataset`."""
    intent: str = "意图"
    """Kind of question (optional column); evaluation shows each kind by itself."""
    pool: str = "数据池"
    """Set of questions that the row belongs to, such as `red_team` (optional column); evaluation
    shows each set by itself, and `dataset.rl_shares` draws RL's prompts by it."""
    dialogue: str = ""
    """Dialogue before the question, such as lines `用户：…` and `客服：…`.

    The stage `extract` asks the teacher for the profile and the history that a row lacks. No column
    is read unless it is named here, such as `对话`: each dialogue costs a call, and is sent to the
    teacher.
    """
    inputs: dict[str, str] = {}
    """Names of the columns that the recipe needs beside these, by the input's name; an input that
    is not listed has the column of its own name."""


class Sql(Section):
    """A query that selects the questions, its columns named as `data.columns` says."""

    url_env: SecretName
    """Name of the environment variable that holds the database's SQLAlchemy URL."""
    query: str
    """One SELECT or WITH. Order its rows by something that stays, so that a duplicate's first row
    stays the first."""


class Data(Section):
    """The source of the questions."""

    workbook: LocalPath = EMBEDDED
    """Path of an .xlsx, .csv, .jsonl or .parquet file, of a folder of them (a drop folder, read in
    the order of the names), or `embedded` for the shipped sample."""
    sql: Sql | None = None
    """Read the questions from a database instead."""
    sheet: str | None = None
    """Sheet name; the first sheet if not given."""
    columns: Columns = Columns()
    pool_shares: dict[str, Share] = {}
    """Shares, by pool, of the rows that neither the workbook nor the recipe puts into one:
    `gold: 0.1` draws a tenth by their ids."""
    max_query_chars: Count = 500
    """A longer query is kept as a failed row (`query_too_long`)."""
    max_context_chars: Count = 2000
    """A row whose profile, history and those further inputs that are part of what is asked are
    together longer is kept as a failed row (`context_too_long`)."""
    max_dialogue_chars: Count = 8_000
    """A row with a longer dialogue is kept as a failed row (`dialogue_too_long`)."""
    max_new_rows: Count = 2_000
    """Most questions, of those that the last dataset version lacks, that one run takes where
    `workbook` is the router's request log (`serve.request_log.folder`).

    Those that were asked on the most days come first; the others wait for the next run
    (`left_for_later`).
    """
    limit: Count | None = None
    """Use only the first rows; for trials. Where rows name a split, a third of these come from
    each."""

    @model_validator(mode="after")
    def _add_up_shares(self) -> Self:
        total = sum(self.pool_shares.values())
        # Shares such as 0.7, 0.2 and 0.1 may add up to a little more than 1.
        if total > 1 + 1e-6:
            raise ValueError(f"pool_shares: add up to {total:g}; make them add up to 1 or less")
        return self


class BatchApi(Section):
    """The teacher's batch API: half the price, an answer within a day."""

    max_requests: Count = 10_000
    """Most requests in one batch; OpenAI takes 50,000 and 200 MB."""
    poll_every_s: Positive = 60
    give_up_after_h: Positive = 26
    """Hours after which a batch is given up: what it lacks is asked row by row, at full price."""


class Extract(Section):
    """Asking the teacher for profile and history in the dialogues of `data.columns.dialogue`."""

    max_profile_chars: Count = 200
    max_history_chars: Count = 400
    """A row with a longer value fails (`extract_too_long`). The prompt allows half of both, as
    models count badly."""
    min_support: Share = 0.5
    """Share of the characters of each clause, such as `孕28周`, that the dialogue must have, beside
    every number; else the row fails (`not_in_dialogue`)."""
    batch_rows: Count = 500
    retries: Annotated[int, Field(ge=0)] = 2
    max_failed_share: Share = 0.1
    """Share of failed rows above which the run stops, as for `distill`."""


class Distill(Section):
    """Asking the teacher."""

    mode: Literal["live", "batch_api"] = "live"
    """`batch_api` sends what the ledger lacks through `/v1/batches`, and row by row what comes back
    without an answer."""
    batch_api: BatchApi = BatchApi()
    batch_rows: Count = 500
    """Rows that one Prefect task works on."""
    retries: Annotated[int, Field(ge=0)] = 2
    """Prefect retries of a batch; only its missing rows are asked again."""
    max_failed_share: Share = 0.1
    """Share of failed rows, among all that the stage was given, above which the run stops at once;
    above 0, one failed row alone never stops it."""


class Validate(Section):
    """Grading the teacher's answers, by RAG, rules and judge as the recipe asks."""

    batch_rows: Count = 500
    retries: Annotated[int, Field(ge=0)] = 2
    max_failed_share: Share = 0.05
    """Share of failed rows above which the run stops, as for `distill`."""
    judge_baseline: bool = True
    """Let the judge score the teacher's answers once, so that RL never has to."""


class Select(Section):
    """The rewrites that may teach; the recipe itself says which answers may that are graded by
    parts."""

    min_top1_score: Share = 0.6
    min_rewrite_chars: Count = 2
    max_rewrite_chars: Count = 120
    boilerplate: tuple[Pattern, ...] = ()
    """Regular expressions, beside the built-in ones, for texts that are no rewrites
    (`boilerplate`)."""
    not_worse_than_original: bool = True
    """A rewrite that retrieves worse than the user's own words must not teach
    (`worse_than_original`)."""


NoiseKind = Literal[
    "emoji",
    "stutter",
    "story",
    "full_width",
    "traditional",
    "pinyin",
    "latin",
    "invisible",
    "punctuation",
    "number",
]


class Dataset(Section):
    """Splits and training files."""

    seed: int = 1
    """Seed of the hashes that put unsplit rows into splits, and choose what is drawn for RL and for
    `augment`."""
    train_share: Share = 0.8
    """Share for training, among the questions that no dataset version has yet; the others keep
    their split."""
    dev_share: Share = 0.1
    near_duplicate_jaccard: Annotated[float, Field(ge=0.5, le=1)] = 0.85
    """Character-trigram similarity from which two questions count as the same; such groups never
    straddle splits."""
    rl_shares: dict[str, Share] = {}
    """Shares of RL's training prompts by the rows' `pool`, such as `red_team: 0.3`; all other rows,
    `train`, have what is left. If not given, RL asks every training row that it can."""
    rl_repeats: Count = 8
    """Most times that a question is among the prompts, where its pool has too few for its share; a
    share that is not reached that way is reported."""
    decontaminate_against: tuple[LocalPath, ...] = ()
    """Workbooks of questions that are kept for evaluation elsewhere: a row that nearly repeats one
    of them, or of the red team, reaches neither training nor development
    (`near_duplicate_of_evaluation`)."""
    augment: dict[NoiseKind, Share] = {}
    """Share of SFT's training rows that are learnt a second time with noise in the question, by the
    kind of noise: `{emoji: 0.05}` (docs/how-to/datasets.md).

    Rows that a kind can't change get none; dev and test never do.
    """
    augment_rl: bool = False
    """RL asks the questions with noise too, each as often as its row's own, and rewards the answers
    in the same way."""

    @model_validator(mode="after")
    def _add_up_shares(self) -> Self:
        if self.train_share + self.dev_share >= 1:
            raise ValueError("train_share + dev_share must leave a share for the test split")
        total = sum(self.rl_shares.values())
        # Without `train` the other rows have what is left, however little that is.
        if total > 1 + 1e-6 or ("train" in self.rl_shares and total < 1 - 1e-6):
            raise ValueError(
                f"rl_shares: add up to {total:g}; make them add up to 1, or leave out `train`"
            )
        return self


class Refresh(Section):
    """The work of a nightly refresh beyond making a dataset."""

    train_at_new_rows: Count | None = None
    """Start the `train` deployment as soon as this many good training rows came in since the last
    training; never if not given."""
    drift_warning: Positive = 0.2
    """Jensen–Shannon distance (0 to 1) of vocabulary, length or score from which a drift is called
    out."""


def _refuse_no_file_name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}", value):
        raise ValueError(
            "a teacher's name is 1 to 40 letters, digits, dots, dashes and underscores, "
            "as files carry it"
        )
    # In any case: names of files are the same in upper and lower case on some systems.
    if value.lower() in ARMS:
        raise ValueError(
            f"{value} has a meaning in every report ({', '.join(ARMS)}); choose another name"
        )
    return value


class Compare(Section):
    """Teachers side by side: which one to buy (docs/how-to/teachers.md)."""

    teachers: dict[Annotated[str, AfterValidator(_refuse_no_file_name)], Endpoint] = {}
    """Teachers to compare with `teacher`, by a name for the report. All are asked live, whatever
    `distill.mode` says."""
    rows: Count = 500
    """Questions that each of them is asked, drawn by a hash of the row's id."""
    tolerable_loss: Share = 0.03
    """Largest loss of a cheaper teacher in top-1, in the top-1 score or in the share of questions
    it answers; in the judge's score it is five times as much.

    One that is shown to lose no more counts as good enough.
    """
