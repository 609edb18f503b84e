"""Opens a PostgreSQL database by URL and creates its tables once. Knows how PostgreSQL's errors read."""

from __future__ import annotations

from sqlalchemy import Connection, Engine, create_engine, exc, inspect, make_url, select, text

from tuning_db.canonical import encoded
from tuning_db.errors import StoreError
from tuning_db.schema import APPLICATION_ID, SCHEMA_VERSION, meta, tool_version


def shown(url: str) -> str:
    """The URL without its password."""
    return make_url(url).render_as_string(hide_password=True)


def explain(error: BaseException, url: str) -> StoreError:
    """The clear form of what the server said, on one line."""
    said = f"tuning database {shown(url)}: {' '.join(str(error).split())}"
    if any(kind.__name__ == "OperationalError" for kind in type(error).__mro__):
        return StoreError(f"{said}; check the address given by --db, and that the server runs")
    return StoreError(said)


def open_url(url: str, readonly: bool) -> Engine:
    """An engine on the database at ``url``, with its tables created under an advisory lock. Raises StoreError."""
    engine = _engine(url, readonly)
    try:
        _prepare(engine, url, readonly)
    except exc.SQLAlchemyError as error:
        raise explain(getattr(error, "orig", None) or error, url) from error
    return engine


def _engine(url: str, readonly: bool) -> Engine:
    try:
        address = make_url(url).set(drivername="postgresql+psycopg")
    except exc.ArgumentError as error:
        raise StoreError("the PostgreSQL URL cannot be read; write it as postgresql://user@host/database") from error
    try:
        return create_engine(
            address,
            pool_pre_ping=True,
            pool_recycle=1800,
            pool_size=2,
            hide_parameters=True,
            json_serializer=encoded,
            connect_args={
                "connect_timeout": 10,
                **({"options": "-c default_transaction_read_only=on"} if readonly else {}),
            },
        )
    except ModuleNotFoundError as error:
        raise StoreError("PostgreSQL needs its driver; type `pip install 'autotune[postgresql]'`") from error


def _prepare(engine: Engine, url: str, readonly: bool) -> None:
    with engine.connect() as connection:
        exists = inspect(connection).has_table("meta")
        connection.rollback()
        if not exists and readonly:
            raise StoreError(f"tuning database {shown(url)} has no tables yet; run `autotune search` first")
        if not exists:
            _migrate(connection)
        version = _version(connection)
        by = connection.execute(select(meta.c.value).where(meta.c.name == "schema_by")).scalar()
        connection.rollback()
    if version < SCHEMA_VERSION:
        raise StoreError(
            f"tuning database {shown(url)} has schema {version}, this tool needs {SCHEMA_VERSION}; "
            f"back it up, end other searches, and type `autotune db upgrade --db {shown(url)}`"
        )
    if version > SCHEMA_VERSION:
        raise StoreError(
            f"tuning database {shown(url)} has schema {version} (of autotune {by or 'unknown'}), this autotune "
            f"{tool_version()} knows up to {SCHEMA_VERSION}; update it with `pip install -U autotune`"
        )


def upgrade(url: str) -> tuple[int, int]:
    """Bring the database at ``url`` to the newest schema; (schema before, schema after). Raises StoreError."""
    engine = _engine(url, readonly=False)
    try:
        with engine.connect() as connection:
            before = _version(connection) if inspect(connection).has_table("meta") else 0
            connection.rollback()
            _migrate(connection)
            return before, _version(connection)
    except exc.SQLAlchemyError as error:
        raise explain(getattr(error, "orig", None) or error, url) from error
    finally:
        engine.dispose()


def _migrate(connection: Connection) -> None:
    """Create the tables or bring them up to date, one process at a time."""
    from tuning_db import migrate

    # Held on this session until it is given up below: Alembic itself does not guard against two creators.
    connection.execute(text("SELECT pg_advisory_lock(:id)"), {"id": APPLICATION_ID})
    connection.commit()
    try:
        exists = inspect(connection).has_table("meta")
        connection.rollback()
        if not exists or _version(connection) < SCHEMA_VERSION:
            with connection.begin():
                migrate.upgrade(connection) if exists else migrate.create(connection)
    finally:
        connection.rollback()
        connection.execute(text("SELECT pg_advisory_unlock(:id)"), {"id": APPLICATION_ID})
        connection.commit()


def _version(connection: Connection) -> int:
    found = connection.execute(select(meta.c.value).where(meta.c.name == "schema_version")).scalar()
    connection.rollback()
    return int(found or 0)
