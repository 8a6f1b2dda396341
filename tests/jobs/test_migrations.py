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


def test_jobs_from_before_there_were_methods_are_supervised(postgres_url: str) -> None:
    admin = create_engine(postgres_url, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text("CREATE DATABASE migrations_of_rows"))
    engine = create_engine(admin.url.set(database="migrations_of_rows"))
    url = engine.url.render_as_string(hide_password=False)
    migrate(url, "0003")
    spec = '{"model": "tiny", "training": {"seed": 7, "dpo": {"beta": 0.2}}}'
    file = "('file-1', 'team-1', 'a', 'fine-tune', 1, '0')"
    job = f"('ftjob-1', 'team-1', '{spec}', '{{}}', 'tiny', 'file-1', 1, '0', 'paused')"
    model = "('ft:tiny', 'fine_tuned', '/', 'ftjob-1')"
    columns = "id, team_id, spec, request, model, training_file, gpus, body_sha256, state"
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO teams (id, name) VALUES ('team-1', 'a')"))
        connection.exec_driver_sql(
            f"INSERT INTO files (id, team_id, filename, purpose, bytes, sha256) VALUES {file}"
        )
        connection.exec_driver_sql(f"INSERT INTO jobs ({columns}) VALUES {job}")
        connection.exec_driver_sql(f"INSERT INTO models (id, kind, path, job_id) VALUES {model}")
    migrate(url)
    with engine.connect() as connection:
        training = connection.execute(text("SELECT spec -> 'training' FROM jobs")).scalar_one()
        assert connection.execute(text("SELECT base_model FROM models")).scalar_one() == "tiny"
    assert training == {"seed": 7, "dpo": {"beta": 0.2}, "method": "supervised", "lora": None}
    engine.dispose()
    admin.dispose()
