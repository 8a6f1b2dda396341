"""The lines that ranks write into their run directory (docs/run-directory.md), checked one by one.

Everything that PostgreSQL would refuse is refused here, so that a bad line can be skipped alone: numbers
that are not finite or too large for their column, NUL characters, text that is not UTF-8.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter

from jobs.state import Phase


def _without_nul(value: object) -> object:
    return value.replace("\0", "\ufffd") if isinstance(value, str) else value


MOST_FIGURES = 64
"""Further figures of a line that are kept."""

Text = Annotated[str, BeforeValidator(_without_nul), Field(max_length=20_000)]
Time = Annotated[float, Field(ge=0, le=2**33, allow_inf_nan=False)]
Step = Annotated[int, Field(ge=0, lt=2**31)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Number = Annotated[float, Field(allow_inf_nan=False)]


class _Line(BaseModel):
    # A newer engine may say more than this service knows.
    model_config = ConfigDict(extra="ignore", frozen=True)

    time: Time


class _Figures(_Line):
    """A line with figures of a method's own beside those that every run has."""

    model_config = ConfigDict(extra="allow")

    @property
    def more(self) -> dict[str, float | None]:
        """By the engine's names; None where a figure was not finite. What is no number is passed over."""
        found = {name: value for name, value in (self.model_extra or {}).items() if _is_figure(name, value)}
        return dict(list(found.items())[:MOST_FIGURES])


def _is_figure(name: str, value: object) -> bool:
    if "\0" in name or len(name) > 64 or isinstance(value, bool):
        return False
    return value is None or (isinstance(value, int | float) and abs(value) < 2.0**63)


class Start(_Line):
    kind: Literal["start"]
    total_steps: Step
    step: Step
    resumed_from: Text | None
    world_size: Count
    examples: Count
    parameters: Count
    model_state_bytes: dict[Text, Count]
    device: Text


class PhaseChange(_Line):
    kind: Literal["phase"]
    phase: Literal[
        Phase.PREPARING,
        Phase.REFERENCING,
        Phase.TRAINING,
        Phase.EVALUATING,
        Phase.CHECKPOINTING,
        Phase.EXPORTING,
    ]


class Preparing(_Line):
    kind: Literal["preparing"]
    param: Literal["training_file", "validation_file"]
    done: Count
    total: Count | None


class Metrics(_Figures):
    kind: Literal["metrics"]
    step: Step
    train_loss: Number | None
    train_accuracy: Number | None
    learning_rate: Number | None
    grad_norm: Number | None
    tokens: Count
    trained_tokens: Count
    tokens_per_second: Number | None
    seconds: Number | None
    elements_sent: Count | None
    skipped: bool


class Evaluation(_Figures):
    kind: Literal["evaluation"]
    step: Step
    valid_loss: Number | None
    valid_accuracy: Number | None


class Sample(_Line):
    kind: Literal["sample"]
    step: Step
    prompt: Text
    answer: Text
    reference: Text


class CheckpointMade(_Line):
    kind: Literal["checkpoint"]
    step: Step
    path: Text
    manifest_sha256: Text
    bytes: Count
    train_loss: Number | None = None
    train_accuracy: Number | None = None
    valid_loss: Number | None = None
    valid_accuracy: Number | None = None


class Pruned(_Line):
    kind: Literal["pruned"]
    path: Text


class Message(_Line):
    kind: Literal["message"]
    level: Literal["info", "warn", "error"]
    message: Text


class Exported(_Line):
    kind: Literal["exported"]
    path: Text
    bytes: Count


EventLine = Annotated[
    Start
    | PhaseChange
    | Preparing
    | Metrics
    | Evaluation
    | Sample
    | CheckpointMade
    | Pruned
    | Message
    | Exported,
    Field(discriminator="kind"),
]


class RankLine(_Line):
    """Memory of one rank at one step."""

    step: Step
    memory: dict[Text, dict[Text, dict[Text, Count]]]
    resident: Count | None
    resident_peak: Count | None


EVENT_LINES: TypeAdapter[EventLine] = TypeAdapter(EventLine)
RANK_LINES: TypeAdapter[RankLine] = TypeAdapter(RankLine)
