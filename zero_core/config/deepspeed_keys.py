"""Keys of a DeepSpeed JSON, read one after the other with their type and bounds; every problem is kept.

A ``Section`` is one object of the document. What is asked of it is what it may hold: a key that nobody
asked for is unknown, and the asked ones are the candidates of its did-you-mean. ``null`` counts as absent,
as in DeepSpeed. The tables have the keys that are only checked, passed on or refused.
"""

import difflib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

Default = TypeVar("Default")
Kind = Literal[
    "flag", "integer", "count", "number", "positive", "fraction", "text", "list", "pair", "fractions"
]

LARGEST = 2**63 - 1

MOST_SUGGESTIONS = 100
"""A hostile document could hold a hundred thousand unknown keys, and each suggestion takes milliseconds."""

LONGEST_SUGGESTED = 80
"""Characters of a word that a suggestion is looked for; no name of DeepSpeed's has half as many."""

DEFAULT_LR = {
    "ASGD": 1e-2,
    "Adadelta": 1.0,
    "Adagrad": 1e-2,
    "Adam": 1e-3,
    "AdamW": 1e-3,
    "Adamax": 2e-3,
    "NAdam": 2e-3,
    "RAdam": 1e-3,
    "RMSprop": 1e-2,
    "Rprop": 1e-2,
    "SGD": 1e-3,
}
"""What DeepSpeed trains with when ``optimizer.params`` has no ``lr``: the default of the class."""

OPTIMIZER_OPTIONS: dict[str, dict[str, Kind]] = {
    "ASGD": {"lambd": "number", "alpha": "number", "t0": "number"},
    "Adadelta": {"rho": "fraction", "eps": "positive"},
    "Adagrad": {"lr_decay": "number", "initial_accumulator_value": "number", "eps": "positive"},
    "Adam": {"betas": "fractions", "eps": "positive", "amsgrad": "flag"},
    "AdamW": {"betas": "fractions", "eps": "positive", "amsgrad": "flag"},
    "Adamax": {"betas": "fractions", "eps": "positive"},
    "NAdam": {
        "betas": "fractions",
        "eps": "positive",
        "momentum_decay": "number",
        "decoupled_weight_decay": "flag",
    },
    "RAdam": {"betas": "fractions", "eps": "positive", "decoupled_weight_decay": "flag"},
    "RMSprop": {"alpha": "number", "eps": "positive", "momentum": "number", "centered": "flag"},
    "Rprop": {"etas": "pair", "step_sizes": "pair"},
    "SGD": {"momentum": "number", "dampening": "number", "nesterov": "flag"},
}
"""Hyperparameters of each class beside ``lr``, ``weight_decay`` and ``maximize``.

The rest of a class's arguments chooses among its kernels, which the engine does itself.
"""

ONE_BIT = "1-bit optimizers are not built; use AdamW, with zero_quantized_gradients to send fewer bits"
NEEDS_MUP = "it needs the shapes of the mup package; use AdamW"

REFUSED_OPTIMIZERS = {
    "onebitadam": ONE_BIT,
    "zerooneadam": ONE_BIT,
    "onebitlamb": ONE_BIT,
    "lamb": "it scales by the norm of a whole tensor, which no shard has; use AdamW",
    "lion": "it is not in torch.optim; use AdamW",
    "muon": "it orthogonalizes whole matrices, which no shard has; use AdamW",
    "muadam": NEEDS_MUP,
    "muadamw": NEEDS_MUP,
    "musgd": NEEDS_MUP,
    "adafactor": "it factors whole matrices, which no shard has; use AdamW",
    "lbfgs": "it takes dot products over all parameters; use AdamW",
    "sparseadam": "gradients are dense here; use AdamW",
}

USE_WARMUP = "use WarmupLR, WarmupDecayLR or WarmupCosineLR"
REFUSED_SCHEDULERS = {
    "lrrangetest": f"it is a search, not a training run; {USE_WARMUP}",
    "onecycle": f"it also drives the momentum; {USE_WARMUP}",
}

REFUSED = {
    "amp": "Apex amp is not supported: use bf16 or fp16",
    "sparse_attention": "attention is the model's own here",
    "compression_training": "compression during training is not supported",
    "hybrid_engine": "generation inside the training engine is not supported",
    "data_efficiency": "curriculum and data routing are not supported",
    "elasticity": "the batch size doesn't follow the number of ranks: write it, or restart with other ranks",
    "autotuning": "the configuration is never searched for: write it",
    "zenflow": "asynchronous updates are not supported",
}

MONITOR: dict[str, Kind] = {
    "enabled": "flag",
    "output_path": "text",
    "job_name": "text",
    "group": "text",
    "team": "text",
    "project": "text",
    "samples_log_interval": "count",
    "workspace": "text",
    "api_key": "text",
    "experiment_name": "text",
    "experiment_key": "text",
    "online": "flag",
    "mode": "text",
}

REPORTS: dict[str, dict[str, Kind]] = {
    "flops_profiler": {
        "enabled": "flag",
        "recompute_fwd_factor": "number",
        "profile_step": "integer",
        "module_depth": "integer",
        "top_modules": "count",
        "detailed": "flag",
        "output_file": "text",
    },
    "comms_logger": {
        "enabled": "flag",
        "verbose": "flag",
        "prof_all": "flag",
        "prof_ops": "list",
        "debug": "flag",
    },
    "tensorboard": MONITOR,
    "wandb": MONITOR,
    "comet": MONITOR,
    "csv_monitor": MONITOR,
}

AIO: dict[str, Kind] = {
    "block_size": "count",
    "queue_depth": "count",
    "thread_count": "count",
    "intra_op_parallelism": "count",
    "single_submit": "flag",
    "overlap_events": "flag",
    "use_gds": "flag",
}

OFFLOAD: dict[str, Kind] = {"nvme_path": "text", "buffer_count": "count", "pin_memory": "flag"}
OFFLOAD_PARAM: dict[str, Kind] = OFFLOAD | {"buffer_size": "count", "max_in_cpu": "count"}
OFFLOAD_OPTIMIZER: dict[str, Kind] = OFFLOAD | {
    "pipeline_read": "flag",
    "pipeline_write": "flag",
    "fast_init": "flag",
    "ratio": "number",
}


@dataclass(frozen=True)
class Problem:
    pointer: str
    """JSON pointer (RFC 6901) of the value; empty for the whole document."""

    reason: str
    did_you_mean: str | None = None

    def __str__(self) -> str:
        hint = "" if self.did_you_mean is None else f"; did you mean {self.did_you_mean!r}?"
        return f"{self.pointer or 'the document'}: {self.reason}{hint}"


class DeepSpeedConfigError(ValueError):
    """All that is wrong with a document, one line each."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__(problems)
        self.problems = problems

    def __str__(self) -> str:
        return "\n".join(map(str, self.problems))


@dataclass(frozen=True)
class Auto:
    """What Hugging Face's trainer writes in place of ``"auto"``."""

    argument: str
    """The field of ``AutoValues`` that it comes from."""

    value: Any
    """``None`` when the caller gave none."""


class Findings:
    """Problems and warnings of one document, and the sections that were opened in it."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.warnings: list[str] = []
        self._sections: list[Section] = []

    def root(self, document: Any) -> "Section":
        if isinstance(document, Mapping):
            return self.open(document, "")
        self.problems.append(Problem("", f"{shown(document)} is not an object"))
        return self.open({}, "")

    def open(self, content: Mapping[str, Any], pointer: str) -> "Section":
        section = Section(content, pointer, self)
        self._sections.append(section)
        return section

    def closest(self, word: str, words: Iterable[str]) -> str | None:
        if len(self.problems) >= MOST_SUGGESTIONS or len(word) > LONGEST_SUGGESTED:
            return None
        by_lower = {known.lower(): known for known in words}
        near = difflib.get_close_matches(word.lower(), by_lower, n=1)
        return by_lower[near[0]] if near else None

    def close(self) -> None:
        """Refuse the unknown keys of every section; raise if there is any problem."""
        for section in self._sections:
            section.refuse_unknown()
        if self.problems:
            raise DeepSpeedConfigError(tuple(self.problems))


class Section:
    def __init__(self, content: Mapping[str, Any], pointer: str, findings: Findings) -> None:
        self._content = content
        self._pointer = pointer
        self._findings = findings
        self._known: set[str] = set()
        self._sections: dict[str, Section] = {}

    def __contains__(self, key: str) -> bool:
        self._known.add(key)
        return self._content.get(key) is not None

    def refuse(self, key: str, reason: str, did_you_mean: str | None = None) -> None:
        self._findings.problems.append(Problem(self._at(key), reason, did_you_mean))

    def warn(self, key: str, text: str) -> None:
        self._findings.warnings.append(f"{self._at(key)}: {text}")

    def require(self, key: str) -> None:
        if key not in self:
            self.refuse(key, "is missing")

    def section(self, key: str) -> "Section":
        """The object under ``key``; an empty one when it is absent or something else."""
        if key not in self._sections:
            value = self._take(key, None)
            if value is not None and not isinstance(value, Mapping):
                self.refuse(key, f"{shown(value)} is not an object")
                value = None
            self._sections[key] = self._findings.open(value or {}, self._at(key))
        return self._sections[key]

    def accept_all(self) -> None:
        """Judge no key of this section: what they may be hangs on a value that was refused."""
        self._known.update(self._content)

    def refuse_unless_disabled(self, key: str, reason: str) -> None:
        value = self._take(key, None)
        if value and not (isinstance(value, Mapping) and value.get("enabled") is False):
            self.refuse(key, f"{reason}; remove it or disable it")

    def refuse_unknown(self) -> None:
        for key in self._content:
            if key not in self._known:
                self.refuse(key, "is not a known key", self._findings.closest(key, self._known))

    def flag(self, key: str, default: bool, *, auto: Auto | None = None) -> bool:
        value = self._take(key, auto)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.refuse(key, f"{shown(value)} is not true or false")
            return default
        return value

    def integer(
        self,
        key: str,
        default: Default,
        *,
        at_least: int = 0,
        at_most: int = LARGEST,
        auto: Auto | None = None,
    ) -> int | Default:
        """A whole number, also when written as ``5e8``."""
        value = self._take(key, auto)
        if value is None:
            return default
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not whole:
            self.refuse(key, f"{shown(value)} is not a whole number")
        elif value < at_least:
            self.refuse(key, f"{shown(value)} must be at least {at_least}")
        elif value > at_most:
            self.refuse(key, f"{shown(value)} must be at most {at_most}")
        else:
            return int(value)
        return default

    def number(
        self,
        key: str,
        default: Default,
        *,
        at_least: float = 0.0,
        above: float = -math.inf,
        at_most: float = math.inf,
        below: float = math.inf,
        auto: Auto | None = None,
    ) -> float | Default:
        value = self._take(key, auto)
        if value is None:
            return default
        number = finite(value)
        if number is None:
            self.refuse(key, f"{shown(value)} is not a finite number")
        elif number < at_least or number <= above:
            bound = f"greater than {above:g}" if above >= at_least else f"at least {at_least:g}"
            self.refuse(key, f"{shown(value)} must be {bound}")
        elif number > at_most or number >= below:
            bound = f"less than {below:g}" if below <= at_most else f"at most {at_most:g}"
            self.refuse(key, f"{shown(value)} must be {bound}")
        else:
            return number
        return default

    def text(self, key: str) -> str | None:
        value = self._take(key, None)
        if value is not None and not isinstance(value, str):
            self.refuse(key, f"{shown(value)} is not a string")
            return None
        return value

    def choice(
        self,
        key: str,
        default: Default,
        options: tuple[str, ...],
        *,
        refused: Mapping[str, str] | None = None,
    ) -> str | Default:
        """One of ``options``, in any case of letters.

        ``refused`` has reasons for words, in small letters, that DeepSpeed knows and this engine doesn't.
        """
        value = self.text(key)
        if value is None:
            return default
        for option in options:
            if option.lower() == value.lower():
                return option
        reason = (refused or {}).get(value.lower())
        if reason is not None:
            self.refuse(key, f"{shown(value)} is not supported: {reason}")
        else:
            allowed = ", ".join(options)
            self.refuse(
                key, f"{shown(value)} is not one of {allowed}", self._findings.closest(value, options)
            )
        return default

    def pair(
        self, key: str, *, below: float = math.inf, auto: Auto | None = None
    ) -> tuple[float, float] | None:
        """Two numbers that are at least 0 and less than ``below``."""
        value = self._take(key, auto)
        if value is None:
            return None
        numbers = [finite(item) for item in value] if isinstance(value, list | tuple) else []
        if len(numbers) == 2 and all(number is not None and 0 <= number < below for number in numbers):
            first, second = numbers
            assert first is not None
            assert second is not None
            return first, second
        limit = "" if math.isinf(below) else f" and less than {below:g}"
        self.refuse(key, f"is not a list of two numbers that are at least 0{limit}")
        return None

    def read(self, kinds: Mapping[str, Kind], autos: Mapping[str, Auto] | None = None) -> dict[str, Any]:
        """Those of the keys that are given, each checked for its kind."""
        found = {key: self._of_kind(key, kind, (autos or {}).get(key)) for key, kind in kinds.items()}
        return {key: value for key, value in found.items() if value is not None}

    def _of_kind(self, key: str, kind: Kind, auto: Auto | None) -> Any:
        match kind:
            case "flag":
                return self.flag(key, False) if key in self else None
            case "integer":
                return self.integer(key, None, at_least=-LARGEST)
            case "count":
                return self.integer(key, None)
            case "number":
                return self.number(key, None, auto=auto)
            case "positive":
                return self.number(key, None, above=0, auto=auto)
            case "fraction":
                return self.number(key, None, below=1)
            case "text":
                return self.text(key)
            case "pair":
                return self.pair(key)
            case "fractions":
                return self.pair(key, below=1, auto=auto)
            case "list":
                value = self._take(key, None)
                if value is not None and not isinstance(value, list):
                    self.refuse(key, f"{shown(value)} is not a list")
                return value

    def _take(self, key: str, auto: Auto | None) -> Any:
        """The value, with ``"auto"`` filled in; ``None`` when absent or when there is nothing to fill in."""
        self._known.add(key)
        value = self._content.get(key)
        if value != "auto":
            return value
        if auto is None:
            self.refuse(key, '"auto" has no value for this key: write one, or leave the key out')
            return None
        if auto.value is None:
            self.refuse(key, f'"auto" takes {auto.argument}, which was not given: give it, or write a value')
        return auto.value

    def _at(self, key: str) -> str:
        return f"{self._pointer}/{key.replace('~', '~0').replace('/', '~1')}"


def finite(value: Any) -> float | None:
    """``value`` as a float, or ``None`` if it is no number, or none that a float holds."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def shown(value: Any) -> str:
    """``value`` for a message: short, whatever its size or depth."""
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list | tuple):
        return "a list"
    text = json.dumps(value[:60] if isinstance(value, str) else value)
    return text if len(text) <= 80 else f"{text[:77]}..."
