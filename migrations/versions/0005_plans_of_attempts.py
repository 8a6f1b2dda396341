"""By which plan an attempt trains, and the next one"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.add_column("attempts", sa.Column("plan", postgresql.JSONB(), nullable=True))
    op.add_column("jobs", sa.Column("training_plan", postgresql.JSONB(), nullable=True))


def downgrade() -> None:
    op.drop_column("jobs", "training_plan")
    op.drop_column("attempts", "plan")
