"""The home of a run's trajectory store: SQLite in its directory, or the database that the config names.

A database also has what the run's directory keeps beside the store (`_KEPT`), so a directory on another disk is
made from it, by its name. A directory with a secret is of that secret's run alone.

The database's URL may have a password. It is in the run's directory, in a file that its owner alone reads, and in
the coordinator and the ingress processes, which run no code of users: no other process is told, and no message has
more than `shown_url` leaves.
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
"""The file of a run directory that holds the URL of its database."""

_KEPT = (
    CONFIG_NAME,
    AUTHORITY_NAME,
    TOKENIZER_HASH_NAME,
    SECRET_NAME,
)  # the secret last: with it a directory is the run's
_MAX_NAME_BYTES = 63  # of a schema


def store_in(run_dir: Path) -> Path | Home:
    """Return where a run's store is, for readers. Raises InvalidRequest without what the database needs."""
    url = _kept_url(run_dir)
    return run_dir / STORE_NAME if url is None else _home(url, run_dir, None)


def has_store(run_dir: Path) -> bool:
    """Tell if a directory is a run's, with a store."""
    return (run_dir / STORE_NAME).is_file() or (run_dir / URL_NAME).is_file()


def open_store(config: ServiceConfig, run_dir: Path, secret: str) -> TrajectoryStore:
    """Open a run's store for its coordinator. Raises as TrajectoryStore."""
    where = home_or(STORE_NAME, config, run_dir, secret)
    return TrajectoryStore(where, min_free_bytes=config.min_free_mib << 20)


def home_or(name: str, config: ServiceConfig, run_dir: Path, secret: str) -> Path | Home:
    """Return the database of a run, or else its file of a name. Raises InvalidRequest."""
    url = _url(config)
    return run_dir / name if url is None else _home(url, run_dir, _owner(secret))


def check_store(config: ServiceConfig, run_dir: Path) -> None:
    """Raise InvalidRequest if a run cannot have the home of its config, or a file of its stores is damaged or of
    another schema version. Makes the tables of a new database."""
    url, kept = _url(config), _kept_url(run_dir)
    if has_store(run_dir) and _shown(kept) != _shown(url):
        raise InvalidRequest(f"the records of {run_dir} are in {_shown(kept)}, not in {_shown(url)}", param="store")
    for path in sorted(run_dir.glob("*.sqlite")):
        check_file(path)
    if (store := run_dir / STORE_NAME).is_file():
        TrajectoryReader(store).close()  # Serve would start a refused coordinator again and again
    if url is not None:
        secret = run_dir / SECRET_NAME
        check_home(_home(url, run_dir, _owner(secret.read_text()) if secret.is_file() else ""))


def restore_run(config: ServiceConfig, run_dir: Path) -> None:
    """Make the directory of a run that its database has, if this disk lacks it.

    Raises InvalidRequest, and Conflict while a service runs that has the run.
    """
    if (url := _url(config)) is None or (run_dir / SECRET_NAME).exists():
        return
    kept = _home(url, run_dir, None).kept()
    if SECRET_NAME in kept:
        for name in filter(kept.__contains__, _KEPT):
            kept_secret(run_dir, name, partial(kept.__getitem__, name))
        keep_url(config, run_dir)


def keep_run(config: ServiceConfig, run_dir: Path) -> None:
    """Keep the URL of a run's database in its directory, and what the directory keeps in the database.

    Raises InvalidRequest if the database has another run of this name, which keeps what it has.
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
    """Keep the URL of a run's database in its directory."""
    if (url := _url(config)) is not None:
        path = run_dir / URL_NAME
        path.touch(mode=0o600)
        path.write_text(url)


def resumed_config(run_dir: Path) -> ServiceConfig | None:
    """Return what `saved_config` does, with the store's URL."""
    config, url = saved_config(run_dir), _kept_url(run_dir)
    return config if config is None or url is None else config.model_copy(update={"store": SecretStr(url)})


def _home(url: str, run_dir: Path, owner: str | None, keeps: Mapping[str, str] | None = None) -> Home:
    scheme = url.partition("://")[0]
    if not parts.is_known(parts.STORAGE, scheme):
        raise InvalidRequest(
            f"store {shown_url(url)}: write postgresql://USER@HOST:PORT/DATABASE, or leave it out for SQLite",
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
