"""Where the service's parts are and what they may use, read from the environment once."""

from functools import cache
from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """``SHARDYARD_*`` variables, and the two addresses that everyone calls by their plain names."""

    model_config = SettingsConfigDict(env_prefix="SHARDYARD_", frozen=True, populate_by_name=True)

    database_url: str = Field(validation_alias="DATABASE_URL")
    """SQLAlchemy address of PostgreSQL, ``postgresql+psycopg://...``."""

    redis_url: str = Field(validation_alias="REDIS_URL")
    """Address of the broker, ``redis://...`` or ``unix://...`` (Celery: ``redis+socket://...``)."""

    data_dir: Path = Path(".shardyard")
    """Files, models, run directories and logs: shared by API and workers."""

    host: str = Field(default="", description="Name of this worker host; empty takes the machine's own.")
    slots: int | None = None
    """Ranks this host may run at once where it has no GPU; ``None`` takes its number of cores."""

    rank_memory_bytes: int | None = Field(default=None, gt=0)
    """Most that a rank may allocate on its host (``RLIMIT_DATA``); ``None`` sets no limit."""

    lease_seconds: float = 30.0
    """How long a claim lives without a heartbeat."""

    heartbeat_seconds: float = 5.0
    """How often a supervisor renews its lease and ships rows."""

    sweep_seconds: float = 3.0
    """How often a worker looks for queued jobs without being woken, and for attempts that died."""

    hang_seconds: float = 600.0
    """A rank without progress for so long is ended with the reason ``hung``."""

    stop_grace_seconds: float = 30.0
    """From asking an attempt to stop until it is killed."""

    retry_delay_seconds: float = 1.0
    """From the loss of an attempt until the job may be claimed again."""

    max_attempts_without_checkpoint: int = 3
    """Attempts in a row that left no new checkpoint before the job fails with ``max_attempts``."""

    max_upload_bytes: int = 8 * 2**30
    """Largest training file."""

    min_free_bytes: int = 256 * 2**20
    """Room that an upload must leave on the disk."""

    min_examples: int = 10
    """Fewest examples a training file may hold."""

    @property
    def files_dir(self) -> Path:
        return self.data_dir / "files"

    @property
    def models_dir(self) -> Path:
        return self.data_dir / "models"

    @property
    def cache_dir(self) -> Path:
        return self.data_dir / "cache"

    def job_dir(self, job_id: str) -> Path:
        return self.data_dir / "jobs" / job_id

    def attempt_dir(self, job_id: str, epoch: int) -> Path:
        return self.job_dir(job_id) / f"a{epoch}"


@cache
def settings() -> Settings:
    return Settings()
