"""What a job is: the request as clients send it, checked once, and the spec that an attempt needs.

``JobRequest`` is OpenAI's body with our native fields beside it. ``resolve`` turns it into ``JobSpec``,
which has every default filled in, is stored with the job and shown as ``resolved_config``.
"""

import difflib
from dataclasses import asdict, fields
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError

from jobs.errors import InvalidRequest, ShardyardError, Unprocessable
from zero_core.config.train import TrainConfig

BRANCHES = ("constrained-", "function-", "int", "float")
"""How pydantic names the branches of a union inside an error's location."""

Auto = Literal["auto"]
MetadataKey = Annotated[str, StringConstraints(min_length=1, max_length=64)]
MetadataValue = Annotated[str, StringConstraints(max_length=512)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Hyperparameters(Strict):
    """OpenAI's, where ``auto`` leaves the choice to the server."""

    n_epochs: Auto | Annotated[int, Field(ge=1, le=50)] = "auto"
    batch_size: Auto | Annotated[int, Field(ge=1, le=256)] = "auto"
    learning_rate_multiplier: Auto | Annotated[float, Field(gt=0, allow_inf_nan=False)] = "auto"


class Supervised(Strict):
    hyperparameters: Hyperparameters = Hyperparameters()


class MethodRequest(Strict):
    type: Literal["supervised"]
    supervised: Supervised = Supervised()


class Resources(Strict):
    gpus: Annotated[int, Field(ge=1, le=1024)] = 1
    """Ranks, each with a GPU; on a host without GPUs, with a slot on its CPU."""


class JobRequest(Strict):
    model: Annotated[str, Field(min_length=1)]
    training_file: Annotated[str, Field(min_length=1)]
    validation_file: str | None = None
    suffix: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,64}$")] | None = None
    seed: Annotated[int, Field(ge=0, le=2147483647)] | None = None
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)] | None = None
    method: MethodRequest | None = None
    hyperparameters: Hyperparameters | None = None
    integrations: list[Any] | None = None
    training: dict[str, Any] = {}
    resources: Resources = Resources()
    priority: Annotated[int, Field(ge=-100, le=100)] = 0


class JobSpec(Strict):
    model: str
    model_path: str
    parameters: int
    """Of the model, tied weights once."""
    training_file_path: str
    validation_file_path: str | None
    training: dict[str, Any]
    """Every field of ``TrainConfig``."""
    resources: Resources
    suffix: str | None


def parse_request(body: dict[str, Any]) -> JobRequest:
    """Check a request's shape. The error's ``param`` is the dotted path of the field."""
    _refuse_other_methods(body.get("method"))
    try:
        request = JobRequest.model_validate(body)
    except ValidationError as error:
        raise _first_problem(error) from error
    if request.integrations:
        raise Unprocessable(
            "integrations: this server has none; leave the field out",
            param="integrations",
            code="unsupported",
        )
    train_config(request)
    return request


def train_config(request: JobRequest) -> TrainConfig:
    """Defaults, then OpenAI's hyperparameters, then the native ``training`` fields: the last one wins."""
    chosen: dict[str, Any] = {}
    hyperparameters = request.hyperparameters or Hyperparameters()
    if request.method is not None:
        hyperparameters = request.method.supervised.hyperparameters
    if hyperparameters.n_epochs != "auto":
        chosen["num_train_epochs"] = hyperparameters.n_epochs
    if hyperparameters.batch_size != "auto":
        chosen["train_batch_size"] = hyperparameters.batch_size
    if hyperparameters.learning_rate_multiplier != "auto":
        chosen["learning_rate"] = TrainConfig.learning_rate * hyperparameters.learning_rate_multiplier
    if request.seed is not None:
        chosen["seed"] = request.seed
    known = {field.name: field for field in fields(TrainConfig)}
    for name, value in request.training.items():
        if name not in known:
            raise _unknown(f"training.{name}", name, list(known))
        _check_type(name, value, known[name].type)
        chosen[name] = value
    try:
        return TrainConfig(**chosen)
    except ValueError as error:
        field = str(error).split(":", 1)[0]
        raise InvalidRequest(f"training.{error}", param=f"training.{field}") from error


def resolve(
    request: JobRequest,
    *,
    model_path: str,
    parameters: int,
    training_file_path: str,
    validation_file_path: str | None,
) -> JobSpec:
    return JobSpec(
        model=request.model,
        model_path=model_path,
        parameters=parameters,
        training_file_path=training_file_path,
        validation_file_path=validation_file_path,
        training=asdict(train_config(request)),
        resources=request.resources,
        suffix=request.suffix,
    )


def _check_type(name: str, value: Any, annotation: Any) -> None:
    """A dataclass takes anything, so types are checked here, as pydantic would."""
    try:
        TypeAdapter(annotation, config=ConfigDict(strict=True)).validate_python(value)
    except ValidationError as error:
        problem = error.errors()[0]["msg"]
        raise InvalidRequest(
            f"training.{name}: {value!r} can't be used: {problem}", param=f"training.{name}"
        ) from error


def _refuse_other_methods(method: Any) -> None:
    kind = method.get("type") if isinstance(method, dict) else None
    if kind in ("dpo", "reinforcement"):
        raise Unprocessable(
            f"method.type: {kind!r} is not supported by this server; use 'supervised'",
            param="method.type",
            code="unsupported_method",
        )


def _first_problem(error: ValidationError) -> ShardyardError:
    """Pydantic's first error in our words; a union's branches are folded into the field they are about."""
    problem = error.errors()[0]
    parts = [str(part) for part in problem["loc"] if part != "literal['auto']"]
    path = ".".join(part for part in parts if not part.startswith(BRANCHES))
    if problem["type"] == "extra_forbidden":
        return _unknown(path, parts[-1], _siblings(parts[:-1]))
    if problem["type"] == "missing":
        return InvalidRequest(f"{path}: it is required", param=path, code="missing_required_parameter")
    return InvalidRequest(f"{path}: {problem['input']!r} can't be used: {problem['msg']}", param=path)


def _siblings(path: list[str]) -> list[str]:
    """Names that are allowed beside an unknown one."""
    model: Any = JobRequest
    for part in path:
        annotation = model.model_fields[part].annotation
        candidates = [annotation, *getattr(annotation, "__args__", ())]
        model = next(c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel))
    return list(model.model_fields)


def _unknown(path: str, name: str, allowed: list[str]) -> Unprocessable:
    close = difflib.get_close_matches(name, allowed, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(sorted(allowed))}"
    return Unprocessable(f"{path}: there is no such field; {hint}", param=path, code="unknown_parameter")
