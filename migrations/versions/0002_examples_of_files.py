"""How many examples a training file has"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.add_column("files", sa.Column("examples", sa.Integer(), nullable=True))


def downgrade() -> None:
    op.drop_column("files", "examples")
