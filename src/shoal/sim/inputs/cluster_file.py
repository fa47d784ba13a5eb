"""cluster.yaml: groups of equal nodes, and users and groups of users with tickets and limits.

nodes:
  - {count: 4, gpus: 8, type: v100, rack: r1, domain: east, name: big}
  - {count: 2, gpus: 4, type: k80}
users:
  - {name: ada, tickets: 2, group: lab, max_gpus: 8}        # or as a mapping: `ada: 2`
groups:
  - {name: lab, tickets: 3, max_gpus_of_type: {v100: 16}, gpu_hours_per_week: 500}
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import yaml

from shoal.core.cluster import Cluster, Group, Node, User
from shoal.core.errors import InputError, ShoalError, did_you_mean
from shoal.core.limits import Limits
from shoal.sim.inputs.column_values import MOST_GPUS
from shoal.sim.inputs.table import check_text, printable, read_head, shortened

_GROUP_KEYS = ("count", "gpus", "type", "rack", "domain", "name")
_LIMITS = ("max_gpus", "max_gpus_of_type", "max_running_jobs", "max_waiting_jobs", "gpu_hours_per_week")
_USER_KEYS = ("name", "tickets", "group", *_LIMITS)
_USER_GROUP_KEYS = ("name", "tickets", *_LIMITS)
_MOST_BYTES = 8 << 20


def read_cluster(path: str | Path) -> Cluster:
    """Read a cluster from a YAML file. Errors name the line."""
    path = Path(path)
    what = "cluster description"
    check_text(read_head(path, what, "`nodes:`"), path, what)
    if path.stat().st_size > _MOST_BYTES:
        raise InputError(f"is too large to be a {what}", file=str(path), line=1)
    return _Reader(str(path)).cluster(_compose(path))


def _compose(path: Path) -> yaml.Node:
    try:
        root = yaml.compose(path.read_text("utf-8-sig"), Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else None
        raise InputError(f"is not valid YAML: {error.problem}", file=str(path), line=line) from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        message = str(error).splitlines()[0]
        raise InputError(f"is not valid YAML: {message}", file=str(path)) from None
    if root is None:
        raise InputError("is empty; a cluster needs `nodes:`", file=str(path), line=1)
    return root


def _text(node: yaml.Node) -> str:
    """A value as written in the file."""
    return str(node.value) if isinstance(node, yaml.ScalarNode) else "a list or mapping"


@dataclass(frozen=True)
class _Reader:
    file: str

    def cluster(self, root: yaml.Node) -> Cluster:
        keys = ("nodes", "users", "groups")
        top = self.mapping(root, keys, "a cluster is a mapping with `nodes:` and `users:`")
        if "nodes" not in top:
            raise self.error(root, "this key is missing: a cluster needs groups of nodes", "nodes")
        nodes: dict[str, Node] = {}
        for group in self.items(top["nodes"], "nodes", "a list of groups, each `- {count: 4, gpus: 8}`"):
            for node in self.group(group, len(nodes)):
                if node.name in nodes:
                    raise self.error(
                        group, f"another node is called {node.name!r}; names must differ", "name"
                    )
                nodes[node.name] = node
        if not nodes:
            raise self.error(top["nodes"], "the list is empty: a cluster needs at least one node", "nodes")
        types = tuple(dict.fromkeys(node.gpu_type for node in nodes.values()))
        groups = self.user_groups(top.get("groups"), types)
        users: dict[str, User] = {}
        for user, place in self.users(top.get("users"), types):
            if user.name in users:
                raise self.error(place, f"another user is called {user.name!r}; names must differ", "users")
            if user.group and user.group not in groups:
                hint = did_you_mean(user.group, groups) if groups else "list it under `groups:`"
                raise self.error(place, f"there is no group {user.group!r}; {hint}", "group")
            users[user.name] = user
        return Cluster(tuple(nodes.values()), tuple(users.values()), groups=tuple(groups.values()))

    def group(self, node: yaml.Node, before: int) -> list[Node]:
        keys = self.mapping(node, _GROUP_KEYS, "a group of nodes is a mapping with count and gpus")
        if "gpus" not in keys:
            raise self.error(node, "this key is missing: say how many GPUs each node has", "gpus")
        gpus = self.count(keys["gpus"], "gpus")
        count = self.count(keys["count"], "count") if "count" in keys else 1
        if (before + count) > MOST_GPUS or count * gpus > MOST_GPUS:
            raise self.error(node, f"more than {MOST_GPUS:,} GPUs; check the numbers", "count")
        text = {key: self.text(keys[key], key) for key in ("type", "rack", "domain", "name") if key in keys}
        name = text.get("name")
        names = (
            [f"node{before + i}" for i in range(count)]
            if name is None
            else [name] if count == 1 else [f"{name}{i}" for i in range(count)]
        )  # fmt: skip
        gpu_type, rack, domain = (
            text.get("type", "gpu"),
            text.get("rack", "rack0"),
            text.get("domain", "domain0"),
        )
        return [Node(each, gpus, gpu_type, rack, domain) for each in names]

    def users(self, node: yaml.Node | None, types: tuple[str, ...]) -> list[tuple[User, yaml.Node]]:
        """(user, YAML node) from a list of users or a mapping of names to tickets."""
        if node is None or self.is_null(node):
            return []
        if isinstance(node, yaml.MappingNode):
            return [(User(self.text(k, "users"), self.tickets(v)), k) for k, v in node.value]
        found: list[tuple[User, yaml.Node]] = []
        for item in self.items(node, "users", "a list `- {name: ada, tickets: 2}` or a mapping `ada: 2`"):
            if isinstance(item, yaml.ScalarNode):
                found.append((User(self.text(item, "name")), item))
                continue
            keys = self.mapping(item, _USER_KEYS, "a user is a mapping with name and tickets")
            if "name" not in keys:
                raise self.error(item, "this key is missing: a user needs a name", "name")
            tickets = self.tickets(keys["tickets"]) if "tickets" in keys else 1.0
            group = self.text(keys["group"], "group") if "group" in keys else ""
            found.append(
                (User(self.text(keys["name"], "name"), tickets, self.limits(keys, types), group), item)
            )
        return found

    def user_groups(self, node: yaml.Node | None, types: tuple[str, ...]) -> dict[str, Group]:
        found: dict[str, Group] = {}
        if node is None or self.is_null(node):
            return found
        for item in self.items(node, "groups", "a list of groups, each `- {name: lab, max_gpus: 8}`"):
            keys = self.mapping(item, _USER_GROUP_KEYS, "a group is a mapping with name, tickets and limits")
            if "name" not in keys:
                raise self.error(item, "this key is missing: a group needs a name", "name")
            name = self.text(keys["name"], "name")
            if name in found:
                raise self.error(item, f"another group is called {name!r}; names must differ", "groups")
            tickets = self.tickets(keys["tickets"]) if "tickets" in keys else None
            found[name] = Group(name, tickets, self.limits(keys, types))
        return found

    def limits(self, keys: dict[str, yaml.Node], types: tuple[str, ...]) -> Limits:
        values: dict[str, object] = {}
        for field in _LIMITS:
            if field not in keys:
                continue
            node = keys[field]
            if field == "max_gpus_of_type":
                by_type = self.mapping(node, types, "must be a mapping of GPU types to numbers, {v100: 4}")
                values[field] = {t: int(self.number(n, t, int, "a whole number")) for t, n in by_type.items()}
            elif field == "gpu_hours_per_week":
                values[field] = self.number(node, field, float, "a number")
            else:
                values[field] = int(self.number(node, field, int, "a whole number"))
            try:
                Limits.from_plain({field: values[field]})
            except ShoalError as error:
                raise self.error(node, str(error).removeprefix(f"{field} "), field) from None
        return Limits.from_plain(values)

    def mapping(self, node: yaml.Node, known: tuple[str, ...], wish: str) -> dict[str, yaml.Node]:
        if not isinstance(node, yaml.MappingNode):
            raise self.error(node, wish)
        keys: dict[str, yaml.Node] = {}
        for key, value in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else str(key.tag)
            if name not in known:
                raise self.error(key, f"unknown key; {did_you_mean(name, known)}", printable(name))
            if name in keys:
                raise self.error(key, "this key occurs twice", name)
            keys[name] = value
        return keys

    def items(self, node: yaml.Node, field: str, wish: str) -> list[yaml.Node]:
        if not isinstance(node, yaml.SequenceNode):
            raise self.error(node, f"must be {wish}", field)
        return list(node.value)

    def text(self, node: yaml.Node, field: str) -> str:
        if not isinstance(node, yaml.ScalarNode) or self.is_null(node):
            raise self.error(node, "must be a name", field)
        return str(node.value)

    def count(self, node: yaml.Node, field: str) -> int:
        value = self.number(node, field, int, "a whole number")
        if not 1 <= value <= MOST_GPUS:
            raise self.error(
                node, f"must be at least 1 and at most {MOST_GPUS:,}, not {shortened(_text(node))}", field
            )
        return int(value)

    def tickets(self, node: yaml.Node) -> float:
        value = self.number(node, "tickets", float, "a number")
        if not (value > 0 and math.isfinite(value)):
            raise self.error(node, f"must be a positive number, not {shortened(_text(node))}", "tickets")
        return value

    def number(self, node: yaml.Node, field: str, kind: Callable[[str], float], wish: str) -> float:
        try:
            return kind(_text(node).replace(".inf", "inf").replace(".nan", "nan"))
        except ValueError:
            raise self.error(node, f"must be {wish}, not {shortened(_text(node))!r}", field) from None

    @staticmethod
    def is_null(node: yaml.Node) -> bool:
        return bool(node.tag == "tag:yaml.org,2002:null")

    def error(self, node: yaml.Node, message: str, field: str | None = None) -> InputError:
        line = node.start_mark.line + 1 if node.start_mark else None
        return InputError(message, file=self.file, line=line, field=field)
