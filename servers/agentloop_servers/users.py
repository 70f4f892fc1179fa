"""The users of a service, from the file in its config; read at the start and after SIGHUP.

users:
  - name: alice
    keys: [9f86d08…]      # SHA-256 of each key, in hex: printf %s "$KEY" | sha256sum
    retired: []           # digests of keys that are no longer valid; data stored under them belongs to alice
    admin: false
    adapters: false       # may push LoRA adapters by name, for its own calls
    share: 1
    limits: {open_calls: 64, sessions: 1000, live_trajectories: 256, tokens_per_minute: 1000000}
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from agentloop.api.owners import UserLimits, UserTable
from agentloop.errors import InvalidRequest
from agentloop_servers.config.service import ServiceConfig, located
from agentloop_servers.http.auth import Keys, User, metrics_digest

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0)]


class _OfUsersFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Limits(_OfUsersFile):
    open_calls: Count | None = None
    sessions: Count | None = None
    live_trajectories: Count | None = None
    tokens_per_minute: Count | None = None


class _User(_OfUsersFile):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._\-]{1,32}$")]
    keys: Annotated[list[Digest], Field(max_length=16)] = []
    retired: Annotated[list[Digest], Field(max_length=64)] = []
    admin: bool = False
    adapters: bool = False
    share: Annotated[float, Field(gt=0, le=1000)] = 1.0
    limits: _Limits = _Limits()

    def user(self) -> User:
        limits = UserLimits(**self.limits.model_dump(), share=self.share)
        keys, retired = (tuple(map(bytes.fromhex, digests)) for digests in (self.keys, self.retired))
        return User(self.name, keys, retired, self.admin, limits, self.adapters)


class _UsersFile(_OfUsersFile):
    users: Annotated[list[_User], Field(min_length=1)]

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        names = [user.name for user in self.users]
        digests = [digest for user in self.users for digest in (*user.keys, *user.retired)]
        for values, kind in ((names, "name"), (digests, "key")):
            if len(set(values)) < len(values):
                raise ValueError(f"a {kind} occurs twice: each must belong to one user")
        return self


def load_users(path: Path) -> tuple[User, ...]:
    """Read a file of users. Raises InvalidRequest, naming the file and the field."""
    try:
        return tuple(entry.user() for entry in _UsersFile.model_validate(yaml.safe_load(path.read_bytes())).users)
    except OSError as error:
        raise InvalidRequest(f"cannot read the user file {path}: {error.strerror}", param="users") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path} is not valid YAML: {error}", param="users") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "users"
        raise InvalidRequest(f"{path}: {where}: {first['msg']}", param=where) from error


def table_of(users: tuple[User, ...]) -> UserTable:
    """Return the users' names and limits for the coordinator, without keys."""
    names = {name: user.name for user in users for name in user.names}
    return UserTable(names, {user.name: user.limits for user in users})


def keys_of(config: ServiceConfig) -> Keys:
    """Return the service's keys, from the user file or from the environment.

    Raises InvalidRequest for an invalid file, and if the host is not a loopback address and there are no keys.
    """
    if config.users is not None:
        keys = Keys(load_users(located(config.users)), is_open=False)
    else:
        keys = Keys.from_environment(config.keys.user_key_env, config.keys.admin_key_env)
    keys.metrics_digest = metrics_digest(config.keys.metrics_key_env)
    keys.check_bind(config.host)
    return keys
