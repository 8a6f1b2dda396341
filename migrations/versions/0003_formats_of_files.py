"""The format of a training file, and what of it is not used"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.add_column("files", sa.Column("format", sa.String(), nullable=True))
    op.add_column(
        "files", sa.Column("warnings", postgresql.JSONB(), server_default=sa.text("'[]'"), nullable=False)
    )


def downgrade() -> None:
    op.drop_column("files", "warnings")
    op.drop_column("files", "format")
