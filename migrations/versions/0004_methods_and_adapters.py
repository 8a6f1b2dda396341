"""Methods, adapters, preparing files, and further numbers of a step"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("prepared", postgresql.JSONB(), nullable=True))
    op.add_column("models", sa.Column("base_model", sa.String(), nullable=True))
    op.add_column(
        "metrics", sa.Column("further", postgresql.JSONB(), server_default=sa.text("'{}'"), nullable=False)
    )
    # What jobs from before there was a choice are: answers need these fields, and ranks take the same values.
    op.execute(
        """
        UPDATE jobs SET spec = jsonb_set(
            spec,
            '{training}',
            '{"method": "supervised", "dpo": {"beta": 0.1}, "lora": null}'::jsonb || (spec -> 'training')
        )
        """
    )
    op.execute("UPDATE models SET base_model = jobs.model FROM jobs WHERE models.job_id = jobs.id")


def downgrade() -> None:
    op.drop_column("metrics", "further")
    op.drop_column("models", "base_model")
    op.drop_column("jobs", "prepared")
