"""What a job is: the request as clients send it, checked once, and the spec that an attempt needs.

``JobRequest`` is OpenAI's body with our native fields beside it. ``resolve`` turns it into ``JobSpec``,
which has every default filled in, is stored with the job and shown as ``resolved_config``.
"""

from dataclasses import asdict, replace
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from pydantic.fields import FieldInfo

from jobs.errors import InvalidRequest, ShardyardError, Unprocessable
from jobs.field_errors import refused, unknown_field
from jobs.training_fields import build_train_config
from jobs.wording import shown
from zero_core.config.dpo import DpoConfig
from zero_core.config.train import TrainConfig, default_learning_rate

_LONGEST_NAME = 80
"""Characters of one part of a path that a message repeats."""

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


class DpoHyperparameters(Hyperparameters):
    beta: Auto | Annotated[float, Field(gt=0, le=2)] = "auto"


class Dpo(Strict):
    hyperparameters: DpoHyperparameters = DpoHyperparameters()


class MethodRequest(Strict):
    type: Literal["supervised", "dpo"]
    supervised: Supervised | None = None
    dpo: Dpo | None = None

    @property
    def hyperparameters(self) -> Hyperparameters | None:
        chosen = self.dpo if self.type == "dpo" else self.supervised
        return chosen.hyperparameters if chosen is not None else None


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
    _refuse_reinforcement(body.get("method"))
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
    _check_method(request)
    train_config(request)
    return request


def train_config(request: JobRequest) -> TrainConfig:
    """Defaults, then OpenAI's hyperparameters, then the native ``training`` fields: the last one wins."""
    method = request.method
    hyperparameters = (method.hyperparameters if method else None) or request.hyperparameters
    chosen = _native(hyperparameters or Hyperparameters())
    if method is not None:
        chosen["method"] = method.type
    if request.seed is not None:
        chosen["seed"] = request.seed
    given = dict(request.training)
    if "dpo" in chosen and isinstance(given.get("dpo"), dict):
        given["dpo"] = {**chosen["dpo"], **given["dpo"]}
    config = build_train_config({**chosen, **given})
    if config.method != "dpo" and config.dpo != DpoConfig():
        raise InvalidRequest(
            f"training.dpo: it is for the method dpo, and the method is {config.method}; set "
            "training.method or method.type to 'dpo', or leave it out",
            param="training.dpo",
        )
    return _with_multiplier(config, hyperparameters)


def _native(hyperparameters: Hyperparameters) -> dict[str, Any]:
    """OpenAI's names and values in ours, but for the multiplier."""
    chosen: dict[str, Any] = {}
    if hyperparameters.n_epochs != "auto":
        chosen["num_train_epochs"] = hyperparameters.n_epochs
    if hyperparameters.batch_size != "auto":
        chosen["train_batch_size"] = hyperparameters.batch_size
    if isinstance(hyperparameters, DpoHyperparameters) and hyperparameters.beta != "auto":
        chosen["dpo"] = {"beta": hyperparameters.beta}
    return chosen


def _with_multiplier(config: TrainConfig, hyperparameters: Hyperparameters | None) -> TrainConfig:
    """Of the default rate, which depends on all the other fields; a rate that is given stays."""
    multiplier = hyperparameters.learning_rate_multiplier if hyperparameters else "auto"
    if multiplier == "auto" or config.learning_rate is not None:
        return config
    default = default_learning_rate(config.method, adapters=config.lora is not None)
    return replace(config, learning_rate=default * multiplier)


def _check_method(request: JobRequest) -> None:
    """What is said of the method twice must agree."""
    method = request.method
    if method is None:
        return
    native = request.training.get("method", method.type)
    if native != method.type:
        raise InvalidRequest(
            f"training.method: {shown(native)} is not the method.type, which is {shown(method.type)}; "
            "leave one of them out",
            param="training.method",
        )
    other = "supervised" if method.type == "dpo" else "dpo"
    if getattr(method, other) is not None:
        raise InvalidRequest(
            f"method.{other}: the method.type is {shown(method.type)}; leave {other} out",
            param=f"method.{other}",
        )


def resolve(
    request: JobRequest,
    *,
    model_path: str,
    parameters: int,
    training_file_path: str,
    validation_file_path: str | None,
) -> JobSpec:
    config = train_config(request)
    return JobSpec(
        model=request.model,
        model_path=model_path,
        parameters=parameters,
        training_file_path=training_file_path,
        validation_file_path=validation_file_path,
        training=asdict(config) | {"learning_rate": config.peak_learning_rate},
        resources=request.resources,
        suffix=request.suffix,
    )


def _refuse_reinforcement(method: Any) -> None:
    if isinstance(method, dict) and method.get("type") == "reinforcement":
        raise Unprocessable(
            "method.type: 'reinforcement' is not supported by this server; use 'supervised' or 'dpo'",
            param="method.type",
            code="unsupported_method",
        )


def _first_problem(error: ValidationError) -> ShardyardError:
    """Pydantic's first error in our words; a union's branches are folded into the field they are about."""
    problem = error.errors()[0]
    field, names, siblings = _locate([str(part) for part in problem["loc"]])
    path = ".".join(name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}..." for name in names)
    if problem["type"] == "extra_forbidden":
        return unknown_field(path, names[-1], siblings)
    if problem["type"] == "missing":
        return InvalidRequest(f"{path}: it is required", param=path, code="missing_required_parameter")
    if field is None:
        # Inside a field's value: a key or an item.
        return refused(path, problem, None)
    return refused(path, problem, field.annotation, tuple(field.metadata))


def _locate(parts: list[str]) -> tuple[FieldInfo | None, list[str], list[str]]:
    """The field that an error's location leads to, the names on the way, and those beside the last one.

    Behind a field that holds no object, pydantic names the branch of its union, a key or an index.
    """
    model: Any = JobRequest
    field: FieldInfo | None = None
    names: list[str] = []
    siblings: list[str] = []
    for part in parts:
        if model is None:
            inside = field is not None and field.annotation is not None and _holds_items(field.annotation)
            return (None, [*names, part], siblings) if inside else (field, names, siblings)
        siblings = list(model.model_fields)
        field = model.model_fields.get(part)
        names.append(part)
        model = _object_in(field.annotation) if field is not None else None
    return field, names, siblings


def _object_in(annotation: Any) -> Any:
    candidates = (annotation, *get_args(annotation))
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)


def _holds_items(annotation: Any) -> bool:
    return any(get_origin(branch) in (dict, list) for branch in _unwrapped(annotation))


def _unwrapped(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Annotated:
        return _unwrapped(get_args(annotation)[0])
    if get_origin(annotation) in (dict, list):
        return [annotation]
    return [annotation, *(inner for branch in get_args(annotation) for inner in _unwrapped(branch))]
