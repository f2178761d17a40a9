"""Writes what the chart takes from elsewhere, so that it is written once: `make chart`, or `--check` for CI.

* `values.schema.json`: `helm/values.schema.base.json`, with the configuration schema of `conflux_ray.config` in it;
* the tables of values in the chart's `README.md`, from the comments of `values.yaml` and that schema;
* `files/`: copies of `dashboards/*.json` and `dashboards/alerts.yaml`, since a chart cannot read beyond its folder.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml

from conflux_ray.config import ConfluxConfig

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "helm" / "conflux"
BASE = ROOT / "helm" / "values.schema.base.json"
DASHBOARDS = ROOT / "dashboards"

REQUIRED = {
    "InstanceConfig": ["device", "drain_timeout_s", "num_replicas", "sp_degree", "tensor_parallel"],
    "IngressConfig": ["num_replicas"],
    "ConfluxConfig": ["ingress", "instance", "model"],
}
"""Keys that the templates compute with: they have a value in values.yaml, and a null must not remove it."""

BEGIN, END = "<!-- {}: made by `make chart` -->", "<!-- {}: end -->"


def configuration_schema() -> dict[str, Any]:
    """JSON schema of `values.conflux`: the configuration's own, without nulls.

    Helm removes a key that is set to null, so null is no value here; without it a refused value has one reason.
    """

    def clean(node: Any) -> Any:
        if isinstance(node, list):
            return [clean(item) for item in node]
        if not isinstance(node, dict):
            return node
        node = {k: clean(v) for k, v in node.items() if k != "title" or not isinstance(v, str)}
        options = [option for option in node.get("anyOf", []) if option != {"type": "null"}]
        if len(options) == 1:
            del node["anyOf"]
            node = options[0] | node
        if node.get("default", ...) is None:
            del node["default"]
        if "$ref" in node:  # draft 7 ignores what stands beside a reference
            node = {"$ref": node["$ref"].replace("#/$defs/", "#/definitions/")}
        return node

    schema = clean(ConfluxConfig.model_json_schema())
    definitions = schema.pop("$defs")
    definitions["ConfluxConfig"] = schema
    for name, keys in REQUIRED.items():
        definitions[name]["required"] = sorted({*definitions[name].get("required", []), *keys})
    return definitions


def values_schema() -> str:
    """The text of values.schema.json."""
    schema = json.loads(BASE.read_text())
    schema["properties"]["conflux"] = {"$ref": "#/definitions/ConfluxConfig"}
    schema["definitions"] |= configuration_schema()
    return json.dumps(schema, indent=2) + "\n"


def chart_values(text: str) -> list[tuple[str, str, str]]:
    """Rows of path, default and description of `values.yaml`.

    Raises:
        ValueError: a value has no description, its own or that of a mapping around it.
    """
    rows: list[tuple[str, str, str]] = []
    path: list[tuple[int, str]] = []
    described: dict[str, bool] = {}
    comment: list[str] = []
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("# -- "):
            comment = [stripped.removeprefix("# -- ")]
        elif stripped.startswith("#"):
            if comment:
                comment.append(stripped.removeprefix("#").strip())
        elif match := re.match(r"^( *)([\w.-]+):(?: (.*))?$", line):
            indent, key, value = len(match[1]), match[2], match[3] or ""
            path = [(depth, name) for depth, name in path if depth < indent]
            around = any(described[".".join(n for _, n in path[: i + 1])] for i in range(len(path)))
            path.append((indent, key))
            name = ".".join(part for _, part in path)
            described[name] = bool(comment)
            if name.split(".")[0] != "conflux":
                if comment:
                    rows.append((name, value, " ".join(comment)))
                elif value and not around:
                    raise ValueError(f"values.yaml: {name} has no `# --` comment; write one above it")
            comment = []
        elif not stripped:
            comment = []
    return rows


def configuration_values() -> list[tuple[str, str, str]]:
    """Rows of path, default and description of `values.conflux`."""
    definitions = configuration_schema()
    rows: list[tuple[str, str, str]] = []

    def walk(name: str, path: str) -> None:
        original = ConfluxConfig.model_json_schema()
        fields = (original if name == "ConfluxConfig" else original["$defs"][name])["properties"]
        for key, field in definitions[name]["properties"].items():
            if "$ref" in field:
                walk(field["$ref"].rpartition("/")[2], f"{path}.{key}")
                continue
            about = [fields[key].get("description", "")]
            if "enum" in field:
                about.append("One of " + ", ".join(f"`{value}`" for value in field["enum"]) + ".")
            default = json.dumps(field["default"]) if "default" in field else ""
            rows.append((f"{path}.{key}", default, " ".join(part for part in about if part)))

    walk("ConfluxConfig", "conflux")
    return rows


def table(rows: list[tuple[str, str, str]]) -> str:
    """A Markdown table."""
    lines = ["| Value | Default | |", "|---|---|---|"]
    for name, default, about in rows:
        cells = (f"`{name}`", f"`{default}`" if default else "", about)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def readme() -> str:
    """README.md with its tables made anew."""
    text = (CHART / "README.md").read_text()
    tables = {
        "configuration": table(configuration_values()),
        "values": table(chart_values((CHART / "values.yaml").read_text())),
    }
    for name, content in tables.items():
        begin, end = BEGIN.format(name), END.format(name)
        before, _, rest = text.partition(begin)
        _, found, after = rest.partition(end)
        if not found:
            raise ValueError(f"README.md: no {begin!r} followed by {end!r}; write both lines where the table goes")
        text = f"{before}{begin}\n{content}\n{end}{after}"
    return text


def outputs() -> dict[Path, str]:
    """What each made file should hold."""
    made = {CHART / "values.schema.json": values_schema(), CHART / "README.md": readme()}
    alerts = DASHBOARDS / "alerts.yaml"
    rules = made[CHART / "files" / "alerts.yaml"] = alerts.read_text()
    if set(yaml.safe_load(rules)) != {"groups"}:
        raise ValueError(
            f"{alerts}: has to be a Prometheus rule file, a mapping of `groups` alone; see its first lines"
        )
    for path in sorted(DASHBOARDS.glob("*.json")):
        made[CHART / "files" / "dashboards" / path.name] = path.read_text()
    return made


def stale() -> list[Path]:
    """Files whose content is not what it should be, or that should not be there."""
    made = outputs()
    left = set((CHART / "files" / "dashboards").glob("*.json")) - set(made)
    return sorted([path for path, text in made.items() if not path.exists() or path.read_text() != text] + list(left))


def main(argv: list[str] | None = None) -> int:
    """Write all files, or say which are stale."""
    parser = argparse.ArgumentParser(description="Make the chart's generated files.")
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 if a file is stale")
    args = parser.parse_args(argv)
    changed = stale()
    made = outputs()
    for path in changed:
        print(f"{'stale' if args.check else 'written'}: {path.relative_to(ROOT)}")
        if args.check:
            continue
        if path not in made:
            path.unlink()
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(made[path])
    return 1 if args.check and changed else 0


if __name__ == "__main__":
    sys.exit(main())
