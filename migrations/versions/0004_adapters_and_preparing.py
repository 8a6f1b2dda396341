"""The base of an adapter, and how far the preparing of a job's files is"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.add_column("models", sa.Column("base_model", sa.String(), nullable=True))
    op.add_column("jobs", sa.Column("prepared", postgresql.JSONB(), nullable=True))


def downgrade() -> None:
    op.drop_column("jobs", "prepared")
    op.drop_column("models", "base_model")
