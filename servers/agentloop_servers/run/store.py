"""The storage backend of a run's trajectory store: SQLite in the run directory, or the database in the config.

A database also stores the other files of the run directory (`_KEPT`), so a run directory can be restored from it on
another disk, by name. A directory with a secret belongs to the run with that secret only.

The database URL may contain a password. Only its owner can read the file with the URL in the run directory, and
only the coordinator and the ingress processes, which do not run user code, receive the URL. Messages show the
result of `shown_url` only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import cast

from pydantic import SecretStr

from agentloop import parts
from agentloop.errors import InvalidRequest
from agentloop.storage.home import Home, shown_url
from agentloop.storage.sqlite import check_file
from agentloop.storage.trajectory_store import STORE_NAME, TrajectoryReader, TrajectoryStore, check_home
from agentloop_servers.config.service import (
    AUTHORITY_NAME,
    CONFIG_NAME,
    SECRET_NAME,
    TOKENIZER_HASH_NAME,
    ServiceConfig,
    kept_secret,
    saved_config,
)

URL_NAME = "store"
"""The name of the file with the database URL in the run directory."""

# The secret is last: a directory with a secret counts as completely restored.
_KEPT = (
    CONFIG_NAME,
    AUTHORITY_NAME,
    TOKENIZER_HASH_NAME,
    SECRET_NAME,
)
_MAX_NAME_BYTES = 63  # limit of PostgreSQL for the name of a schema


def store_in(run_dir: Path) -> Path | Home:
    """Return the storage backend of a run for readers. Raises InvalidRequest if the backend's package is
    missing."""
    url = _kept_url(run_dir)
    return run_dir / STORE_NAME if url is None else _home(url, run_dir, None)


def has_store(run_dir: Path) -> bool:
    """Return True if a directory is a run directory with a store."""
    return (run_dir / STORE_NAME).is_file() or (run_dir / URL_NAME).is_file()


def open_store(config: ServiceConfig, run_dir: Path, secret: str) -> TrajectoryStore:
    """Open a run's store for its coordinator. Raises the errors of TrajectoryStore."""
    where = home_or(STORE_NAME, config, run_dir, secret)
    return TrajectoryStore(where, min_free_bytes=config.min_free_mib << 20)


def home_or(name: str, config: ServiceConfig, run_dir: Path, secret: str) -> Path | Home:
    """Return the database of a run, or without a database its file `name`. Raises InvalidRequest."""
    url = _url(config)
    return run_dir / name if url is None else _home(url, run_dir, _owner(secret))


def check_store(config: ServiceConfig, run_dir: Path) -> None:
    """Raise InvalidRequest if a run cannot use the storage backend of its config, or if a file of its stores is
    damaged or has another schema version. Creates the tables of a new database."""
    url, kept = _url(config), _kept_url(run_dir)
    if has_store(run_dir) and _shown(kept) != _shown(url):
        raise InvalidRequest(
            f"the records of {run_dir} are in {_shown(kept)}, not in {_shown(url)}: set `store` to the former, or"
            " start a new run",
            param="store",
        )
    for path in sorted(run_dir.glob("*.sqlite")):
        check_file(path)
    if (store := run_dir / STORE_NAME).is_file():
        TrajectoryReader(store).close()  # check now: Serve would restart a failing coordinator endlessly
    if url is not None:
        secret = run_dir / SECRET_NAME
        check_home(_home(url, run_dir, _owner(secret.read_text()) if secret.is_file() else ""))


def restore_run(config: ServiceConfig, run_dir: Path) -> None:
    """Restore the files of a run directory from the run's database, if they are missing on this disk.

    Raises InvalidRequest, and Conflict while another service owns the run.
    """
    if (url := _url(config)) is None or (run_dir / SECRET_NAME).exists():
        return
    kept = _home(url, run_dir, None).kept()
    if SECRET_NAME in kept:
        for name in filter(kept.__contains__, _KEPT):
            kept_secret(run_dir, name, partial(kept.__getitem__, name))
        keep_url(config, run_dir)


def keep_run(config: ServiceConfig, run_dir: Path) -> None:
    """Store the database URL in the run directory, and the directory's files (`_KEPT`) in the database.

    Raises InvalidRequest, and changes nothing, if the database has another run with this name.
    """
    if (url := _url(config)) is not None:
        kept = {name: (run_dir / name).read_text() for name in _KEPT if (run_dir / name).exists()}
        check_home(_home(url, run_dir, _owner(kept[SECRET_NAME]), kept))
        keep_url(config, run_dir)


def url_elsewhere(config: ServiceConfig, run_dir: Path) -> str:
    """Return the URL of a run's database for processes on other hosts. Raises InvalidRequest."""
    url = _url(config)
    assert url is not None
    return _home(url, run_dir, None).url_elsewhere()


def keep_url(config: ServiceConfig, run_dir: Path) -> None:
    """Store the database URL in the run directory, readable by its owner only."""
    if (url := _url(config)) is not None:
        path = run_dir / URL_NAME
        path.touch(mode=0o600)
        path.write_text(url)


def resumed_config(run_dir: Path) -> ServiceConfig | None:
    """Return `saved_config` with the database URL, which the saved config does not contain."""
    config, url = saved_config(run_dir), _kept_url(run_dir)
    return config if config is None or url is None else config.model_copy(update={"store": SecretStr(url)})


def _home(url: str, run_dir: Path, owner: str | None, keeps: Mapping[str, str] | None = None) -> Home:
    scheme = url.partition("://")[0]
    if not parts.is_known(parts.STORAGE, scheme):
        raise InvalidRequest(
            f"unknown store {shown_url(url)}: expected postgresql://USER@HOST:PORT/DATABASE; for SQLite, remove the"
            " key",
            param="store",
        )
    made = cast(Callable[..., Home], parts.load(parts.STORAGE, scheme, param="store"))
    name = run_dir.name.encode()[:_MAX_NAME_BYTES].decode(errors="ignore")
    return made(url, name, run_dir, owner, keeps)


def _url(config: ServiceConfig) -> str | None:
    return None if config.store is None else config.store.get_secret_value()


def _kept_url(run_dir: Path) -> str | None:
    path = run_dir / URL_NAME
    return path.read_text() if path.is_file() else None


def _shown(url: str | None) -> str:
    return "SQLite" if url is None else shown_url(url)


def _owner(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
