"""What a running server says of the model it serves, over `/v1/models`."""

from __future__ import annotations

import json
import math
import re
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class ServerError(RuntimeError):
    """A server that cannot be measured; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Model:
    """A served model.

    Args:
        name: in the API.
        max_model_len: tokens; None if the server does not say.
        vocab_size: None if the server does not name a folder with the model's config.json.
    """

    name: str
    max_model_len: int | None
    vocab_size: int | None


def get_json(url: str, api_key: str | None = None, timeout: float = 10.0) -> Any:
    """A GET.

    Raises:
        OSError: no answer, or none that is good.
        ValueError: the answer is no JSON.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=timeout) as response:
        return json.loads(response.read())


def healthy(url: str) -> bool:
    """Whether `/health` answers 200."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return response.status == 200
    except OSError:
        return False


def ready_instances(url: str) -> int:
    """Instances of Conflux that its ingress has sessions with and that take requests, by its `/metrics`."""
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=5) as response:
            text = response.read().decode(errors="replace")
    except OSError:
        return 0
    return sum(int(float(value)) for value in re.findall(r"^conflux_router_ready_instances\b.* (\S+)$", text, re.M))


def model_of(url: str, name: str | None = None, api_key: str | None = None) -> Model:
    """The served model, the first one if no name is given.

    Raises:
        ServerError: the server does not answer, or serves no such model.
    """
    try:
        cards = get_json(f"{url.rstrip('/')}/v1/models", api_key)["data"]
    except urllib.error.HTTPError as error:
        raise ServerError(f"{url}/v1/models answers HTTP {error.code}; is it an OpenAI-compatible server?") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ServerError(f"{url}/v1/models does not answer ({error}); start the server, or correct --url") from None
    found = [card for card in cards if name is None or card.get("id") == name]
    if not found:
        raise ServerError(f"{url} serves {', '.join(c.get('id', '?') for c in cards)}, not {name!r}; correct --model")
    card = found[0]
    return Model(card["id"], card.get("max_model_len"), vocab_size_of(card.get("root") or card["id"]))


_KV_CAPACITY = (
    re.compile(r"ready: (\d+) KV blocks of (\d+) tokens"),  # `cluster.instance`, of a logical rank
    re.compile(r"GPU KV cache size: ([\d,]+) tokens"),  # vLLM, of a server
)


def kv_tokens_in(log: str) -> int | None:
    """Tokens of KV that a log says one logical rank of Conflux has, or one vLLM server; None if it does not say.

    The last one counts: a server may have been restarted.
    """
    for pattern in _KV_CAPACITY:
        found = pattern.findall(log)
        if found:
            words = [found[-1]] if isinstance(found[-1], str) else found[-1]
            return math.prod(int(word.replace(",", "")) for word in words)
    return None


def vocab_size_of(folder: str) -> int | None:
    """Of a model folder on this machine; None if it is none."""
    try:
        return int(json.loads((Path(folder) / "config.json").read_text())["vocab_size"])
    except (OSError, ValueError, KeyError):
        return None
