"""The migrations make exactly the tables, and take them away again."""

from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import create_engine, inspect, text

from jobs.bootstrap import migrate
from jobs.tables import Table


def test_up_makes_the_tables_exactly_and_down_removes_them(postgres_url: str) -> None:
    admin = create_engine(postgres_url, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text("CREATE DATABASE migrations_test"))
    engine = create_engine(admin.url.set(database="migrations_test"))
    url = engine.url.render_as_string(hide_password=False)
    for _ in range(2):
        migrate(url)
        with engine.connect() as connection:
            assert compare_metadata(MigrationContext.configure(connection), Table.metadata) == []
        migrate(url, "base")
        assert inspect(engine).get_table_names() == ["alembic_version"]
        inspect(engine).clear_cache()
    engine.dispose()
    admin.dispose()
