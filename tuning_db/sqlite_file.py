"""Opens one SQLite file safely: right kind of file, undamaged, private, in WAL mode, created once. Knows no table.

Nothing here overwrites, renames or converts a file that is not ours: its header is read before SQLite touches it.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import shlex
import sqlite3
import struct
import time
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from sqlalchemy import Connection, Engine, create_engine, event, exc
from sqlalchemy.pool import QueuePool

from tuning_db.canonical import encoded
from tuning_db.errors import Damaged, StoreError, StoreWarning
from tuning_db.schema import APPLICATION_ID, SCHEMA_VERSION, tool_version

BUSY_SECONDS = 30.0
NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "virtiofs", "ceph", "lustre", "glusterfs", "afs"})
ALWAYS_CHECKED = 64 << 20
"""Bytes up to which a file is checked at every open; a larger one when it is opened to write after a quiet day, and by
`autotune db check`."""

_SENTENCES = (
    ("full", "the disk is full; free some space, or choose another file with --db"),
    ("disk i/o error", "reading or writing failed; is the disk full? Choose another file with --db"),
    ("readonly", "it cannot be written; mend its permissions, or choose another file with --db"),
    ("locked", f"another process held it locked for {BUSY_SECONDS:.0f} s; try again when that one has ended"),
    (
        "unable to open",
        "it cannot be opened; mend the permissions of it and of its folder, or choose another with --db",
    ),
)


def explain(error: BaseException, path: Path) -> StoreError:
    """The clear form of what SQLite said about the file at ``path``."""
    text = str(error)
    for mark, sentence in _SENTENCES:
        if mark in text.lower():
            return StoreError(f"tuning database {path}: {sentence} ({text})")
    if "malformed" in text or "not a database" in text or "corrupt" in text:
        return damaged(path, text)
    return StoreError(f"tuning database {path}: {text}")


def damaged(path: Path, what: str) -> Damaged:
    """The error for a file whose content is wrong; it says that the file was left alone and how to save its rows."""
    saved = shlex.quote(str(path.with_suffix(".recovered.db")))
    return Damaged(
        f"tuning database {path} is damaged: {what}. It was left as it is. Try "
        f"`sqlite3 {shlex.quote(str(path))} .recover | sqlite3 {saved}`, put it aside "
        "with `autotune db check --aside`, or choose another file with --db"
    )


def connect(path: Path, readonly: bool = False) -> Engine:
    """An engine on an existing file. Writers begin IMMEDIATE (execution option ``write``), readers DEFERRED."""
    uri = _uri(path, readonly)

    def open_file() -> sqlite3.Connection:
        raw = sqlite3.connect(uri, uri=True, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        raw.execute("PRAGMA foreign_keys=ON")
        raw.execute("PRAGMA synchronous=NORMAL")
        # SQLite's own knows ASCII only; filters compare in any case of any alphabet.
        raw.create_function(
            "lower", 1, lambda text: text.lower() if isinstance(text, str) else text, deterministic=True
        )
        return raw

    engine = create_engine(
        "sqlite+pysqlite://",
        creator=open_file,
        poolclass=QueuePool,
        hide_parameters=True,
        json_serializer=encoded,
    )

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        write = connection.get_execution_options().get("write", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")

    return engine


def open_path(path: Path, readonly: bool) -> Engine:
    """An engine on the file at ``path``, created with its tables if missing and not ``readonly``. Raises StoreError.

    A file of an older schema is first copied beside itself and then brought up to date, for a reader too.
    """
    if readonly:
        if not path.is_file():
            raise StoreError(
                f"there is no tuning database at {path}; run `autotune search` first, or name one with --db"
            )
        version = check(path)
        if version == 0:
            raise StoreError(f"tuning database {path} has no tables yet; run `autotune search` first")
        if version < SCHEMA_VERSION:
            _upgrade_for_reading(path, version)
        return connect(path, readonly=True)
    with locked(path):
        warn_if_network(path)
        version = prepare(path)
        engine = connect(path)
        try:
            use_wal(engine, path)
            if version < SCHEMA_VERSION:
                _bring_up_to_date(engine, path, version)
        except exc.SQLAlchemyError as error:
            engine.dispose()
            raise explain(getattr(error, "orig", None) or error, path) from error
    return engine


def _bring_up_to_date(engine: Engine, path: Path, version: int) -> None:
    from tuning_db import migrate  # Alembic takes longer to import than the rest of an open

    if version:
        kept = copy(path, free_name(path, f"schema{version}"))
        warnings.warn(
            f"tuning database {path} had schema {version} and now has {SCHEMA_VERSION}; {kept.name} beside it is a "
            "copy of what it was",
            StoreWarning,
            stacklevel=2,
        )
    with engine.connect().execution_options(write=True) as connection, connection.begin():
        migrate.upgrade(connection) if version else migrate.create(connection)


def _upgrade_for_reading(path: Path, version: int) -> None:
    try:
        open_path(path, readonly=False).dispose()
    except StoreError as error:
        raise StoreError(
            f"tuning database {path} has schema {version}, this tool reads {SCHEMA_VERSION}, and it cannot be brought "
            f"up to date where it lies; copy it to a folder of yours and name the copy with --db ({error})"
        ) from error


def copy(path: Path, target: Path) -> Path:
    """A consistent copy of a database that others may be writing to, private and on the disk. Raises StoreError.

    Refuses to overwrite; a copy cut short leaves no ``target``.
    """
    half = target.with_name(target.name + ".part")
    try:
        os.close(os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        half.unlink(missing_ok=True)
        os.close(os.open(half, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except FileExistsError as error:
        raise StoreError(f"{target} exists already and was left as it is; name another file") from error
    except OSError as error:
        raise _refused(target, error) from error
    try:
        with reading(path) as source, closing(sqlite3.connect(half)) as into:
            source.backup(into)
            into.execute("PRAGMA journal_mode=DELETE")  # one file, complete without a log beside it
        half.replace(target)
    except BaseException as error:
        half.unlink(missing_ok=True)
        target.unlink(missing_ok=True)
        if isinstance(error, sqlite3.Error):
            raise explain(error, target) from error
        raise
    return target


def free_name(path: Path, word: str) -> Path:
    """A name beside ``path`` that says what is kept there and since when, such as ``tuning.db.schema1-…Z``."""
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    first = path.with_name(f"{path.name}.{word}-{stamp}")
    numbered = (first.with_name(f"{first.name}-{number}") for number in itertools.count(2))
    return first if not first.exists() else next(name for name in numbered if not name.exists())


def prepare(path: Path) -> int:
    """Check the file, creating an empty one if there is none; the schema version as of `check`. Hold `locked`.

    Raises StoreError for a directory, a foreign, damaged or newer file, and one that cannot be written.
    """
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise _refused(path, error) from error
    if path.stat().st_size == 0:
        if _has_log(path):
            raise damaged(path, "it is empty although its -wal file is not")
        _mark(path)
    return check(path, readonly=False)


def check(path: Path, readonly: bool = True) -> int:
    """The schema version, 0 if there are no tables yet. Raises StoreError for a foreign, damaged or newer file."""
    _check_header(path)
    with reading(path, readonly) as raw:
        quiet = not readonly and time.time() - path.stat().st_mtime > 86400
        if path.stat().st_size <= ALWAYS_CHECKED or quiet:
            (answer,) = raw.execute("PRAGMA quick_check(1)").fetchone()
            if answer != "ok":
                raise damaged(path, " ".join(str(answer).split()))
        (version,) = raw.execute("PRAGMA user_version").fetchone()
        (tables,) = raw.execute("SELECT count(*) FROM sqlite_master WHERE type = 'table'").fetchone()
        by = raw.execute("SELECT value FROM meta WHERE name = 'schema_by'").fetchone() if version > 1 else None
    if version > SCHEMA_VERSION:
        raise StoreError(
            f"tuning database {path} has schema {version} (of autotune {by[0] if by else 'unknown'}), this autotune "
            f"{tool_version()} knows up to {SCHEMA_VERSION}; update it with `pip install -U autotune`, or choose "
            "another file with --db"
        )
    if (version == 0) != (tables == 0):
        raise damaged(path, f"it has {tables} tables and schema version {version}")
    return int(version)


@contextmanager
def reading(path: Path, readonly: bool = True) -> Iterator[sqlite3.Connection]:
    """A plain connection to an existing file, for what SQLAlchemy is not needed for. Raises StoreError."""
    try:
        raw = sqlite3.connect(_uri(path, readonly), uri=True, timeout=BUSY_SECONDS)
        try:
            yield raw
        finally:
            raw.close()
    except sqlite3.Error as error:
        raise explain(error, path) from error


def _check_header(path: Path) -> None:
    try:
        with path.open("rb") as file:
            header = file.read(100)
    except OSError as error:
        raise StoreError(
            f"tuning database {path} cannot be read: {error.strerror}; choose another with --db"
        ) from error
    if len(header) < 100 or not header.startswith(b"SQLite format 3\x00"):
        raise StoreError(
            f"{path} is not a tuning database, or its beginning is damaged. It was left as it is; "
            "choose another file with --db"
        )
    (mark,) = struct.unpack(">I", header[68:72])
    if mark != APPLICATION_ID:
        raise StoreError(
            f"{path} is an SQLite database of another program (application_id {mark:#x}). It was left as it is; "
            "choose another file with --db"
        )


def use_wal(engine: Engine, path: Path) -> None:
    """Switch the file to write-ahead logging, so that readers and writers do not block each other, and check that."""
    with engine.connect() as connection:
        raw = connection.connection.driver_connection
        assert isinstance(raw, sqlite3.Connection)
        (mode,) = raw.execute("PRAGMA journal_mode=WAL").fetchone()
    if mode != "wal":
        raise StoreError(
            f"tuning database {path}: its file system does not allow WAL mode ({mode}); choose --db elsewhere"
        )


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold ``<path>.lock``, so that one process at a time creates or checks the file. Makes the folder, private."""
    _make_folder(path)
    beside = path.with_name(path.name + ".lock")
    try:
        handle = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _refused(path, error) from error
    try:
        ends = time.monotonic() + 2 * BUSY_SECONDS
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > ends:
                    raise StoreError(
                        f"{beside} is held by another process that opens the database; try again"
                    ) from None
                time.sleep(0.01)
        yield
    finally:
        os.close(handle)


def warn_if_network(path: Path, mounts: Path = Path("/proc/mounts")) -> None:
    """Warn when the file lies on a network file system, where SQLite's locks are known to fail."""
    kind = file_system(path, mounts)
    if kind in NETWORK or kind.startswith("fuse"):
        warnings.warn(
            f"tuning database {path} lies on a network file system ({kind}), where SQLite files get damaged; "
            "choose a local file with --db, or a PostgreSQL URL",
            StoreWarning,
            stacklevel=2,
        )


def file_system(path: Path, mounts: Path) -> str:
    """The type of the file system that holds ``path``, as ``mounts`` (in the format of /proc/mounts) tells; else ''."""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    best, kind = -1, ""
    where = path.absolute().parent.resolve()
    for line in lines:
        parts = line.split(" ")
        if len(parts) < 3:
            continue
        point = Path(parts[1].replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\"))
        if where.is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), parts[2]
    return kind


def _uri(path: Path, readonly: bool) -> str:
    query = "mode=ro" if readonly else "mode=rw"
    if readonly and not os.access(path.parent, os.W_OK) and not _has_log(path):
        query += "&immutable=1"  # SQLite would need to create the shared-memory file beside it
    return f"{path.absolute().as_uri()}?{query}"


def _mark(path: Path) -> None:
    # Written before the switch to WAL, so that the header names the owner from the very first page on.
    try:
        raw = sqlite3.connect(_uri(path, False), uri=True, timeout=BUSY_SECONDS)
        try:
            raw.execute(f"PRAGMA application_id={APPLICATION_ID}")
        finally:
            raw.close()
    except sqlite3.Error as error:
        raise explain(error, path) from error


def _make_folder(path: Path) -> None:
    if path.is_dir():
        raise StoreError(
            f"{path} is a directory; name a file in it, such as --db {shlex.quote(str(path / 'tuning.db'))}"
        )
    missing = [folder for folder in path.absolute().parents if not folder.exists()]
    try:
        for folder in reversed(missing):
            folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise _refused(path, error) from error


def _has_log(path: Path) -> bool:
    log = path.with_name(path.name + "-wal")
    return log.exists() and log.stat().st_size > 0


def _refused(path: Path, error: OSError) -> StoreError:
    return StoreError(
        f"tuning database {path} cannot be opened for writing: {error.strerror}; "
        "mend the permissions, or choose another file with --db"
    )
