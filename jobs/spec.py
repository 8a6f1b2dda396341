"""What a job is: the request as clients send it, checked once, and the spec that an attempt needs.

``JobRequest`` is OpenAI's body with our native fields beside it. ``resolve`` turns it into ``JobSpec``,
which has every default filled in, is stored with the job and shown as ``resolved_config``.
"""

from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from pydantic.fields import FieldInfo

from jobs.errors import InvalidRequest, ShardyardError, Unprocessable
from jobs.refusals import field_type, shown, unknown, unusable
from jobs.training import PATH, make_config, read_fields
from zero_core.config.dpo import DpoConfig
from zero_core.config.train import Method, TrainConfig, default_learning_rate

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


class DpoHyperparameters(Hyperparameters):
    beta: Auto | Annotated[float, Field(gt=0, le=2)] = "auto"


class Supervised(Strict):
    hyperparameters: Hyperparameters = Hyperparameters()


class Dpo(Strict):
    hyperparameters: DpoHyperparameters = DpoHyperparameters()


class MethodRequest(Strict):
    type: Method
    supervised: Supervised | None = None
    dpo: Dpo | None = None

    @property
    def hyperparameters(self) -> Hyperparameters:
        """Those of the method that is asked for."""
        chosen = self.dpo if self.type == "dpo" else self.supervised
        return chosen.hyperparameters if chosen else Hyperparameters()


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
    _refuse_settings_of_other_methods(request.method)
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
    native = read_fields(TrainConfig, request.training)
    method = _method(request, native.get("method"))
    if method != "dpo" and native.get("dpo", DpoConfig()) != DpoConfig():
        raise InvalidRequest(
            f"{PATH}.dpo: the method is {method!r}, which has no use for it; set method.type to 'dpo', or "
            "leave it out",
            param=f"{PATH}.dpo",
        )
    chosen = _from_hyperparameters(request, method, with_lora=native.get("lora") is not None)
    if request.seed is not None:
        chosen["seed"] = request.seed
    if "dpo" in chosen and not request.training.get("dpo"):
        native.pop("dpo", None)
    return make_config(TrainConfig, {"method": method, **chosen, **native})


def _method(request: JobRequest, native: Method | None) -> Method:
    if request.method is None:
        return native or "supervised"
    if native is not None and native != request.method.type:
        raise InvalidRequest(
            f"{PATH}.method: {native!r} is not the method.type {request.method.type!r}; give one of them, "
            "or both alike",
            param=f"{PATH}.method",
        )
    return request.method.type


def _from_hyperparameters(request: JobRequest, method: Method, *, with_lora: bool) -> dict[str, Any]:
    """OpenAI's hyperparameters, where they are not ``auto``, as fields of ``TrainConfig``."""
    given = request.method.hyperparameters if request.method else request.hyperparameters
    if given is None:
        return {}
    chosen: dict[str, Any] = {}
    if given.n_epochs != "auto":
        chosen["num_train_epochs"] = given.n_epochs
    if given.batch_size != "auto":
        chosen["train_batch_size"] = given.batch_size
    if given.learning_rate_multiplier != "auto":
        default = default_learning_rate(method, with_lora)
        chosen["learning_rate"] = default * given.learning_rate_multiplier
    if isinstance(given, DpoHyperparameters) and given.beta != "auto":
        chosen["dpo"] = DpoConfig(given.beta)
    return chosen


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


def _refuse_other_methods(method: Any) -> None:
    kind = method.get("type") if isinstance(method, dict) else None
    if kind == "reinforcement":
        raise Unprocessable(
            f"method.type: {kind!r} is not supported by this server; use 'supervised' or 'dpo'",
            param="method.type",
            code="unsupported_method",
        )


def _refuse_settings_of_other_methods(method: MethodRequest | None) -> None:
    for name in get_args(Method):
        if method is not None and name != method.type and getattr(method, name) is not None:
            raise InvalidRequest(
                f"method.{name}: the method.type is {method.type!r}; leave the settings of other methods out",
                param=f"method.{name}",
            )


def _first_problem(error: ValidationError) -> ShardyardError:
    """Pydantic's first error in our words."""
    problem = error.errors()[0]
    place = _Place.of([str(part) for part in problem["loc"]])
    if problem["type"] == "extra_forbidden":
        return unknown(place.path, place.name, place.siblings)
    if problem["type"] == "missing":
        return InvalidRequest(
            f"{place.path}: it is required", param=place.path, code="missing_required_parameter"
        )
    assert place.field is not None
    if problem["type"].startswith(("string_too", "too_")) or place.inside:
        # About the size of the value, or about a part of it: pydantic's words fit.
        return InvalidRequest(
            f"{place.path}: {shown(problem['input'])} can't be used: {problem['msg']}", param=place.path
        )
    return unusable(place.path, problem["input"], field_type(place.field))


@dataclass(frozen=True)
class _Place:
    """Where in a request an error is."""

    path: str
    name: str
    siblings: list[str]
    """Names that are allowed beside it."""
    field: FieldInfo | None
    """None where there is no such field."""
    inside: bool
    """It is about a key or an item of the field's value."""

    @classmethod
    def of(cls, location: list[str]) -> "_Place":
        model: type[BaseModel] | None = JobRequest
        parts: list[str] = []
        while model is not None and len(parts) < len(location):
            name, siblings = location[len(parts)], list(model.model_fields)
            field = model.model_fields.get(name)
            parts.append(name)
            model = _model_in(field.annotation) if field else None
        # What follows is a place in a container, or only names a branch of the field's union.
        rest = location[len(parts) :]
        inside = bool(rest) and field is not None and _has_container(field.annotation)
        keys = [part for part in rest if part != "[key]"] if inside else []
        return cls(".".join([*parts, *keys]), name, siblings, field, inside)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    candidates = (annotation, *get_args(annotation))
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)


def _has_container(annotation: Any) -> bool:
    return get_origin(annotation) in (dict, list) or any(map(_has_container, get_args(annotation)))
