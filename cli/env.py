"""``trapetum env``: what a bug report needs to say about the machine and the installation."""

from __future__ import annotations

from typing import Any

from trapetum.cli.options import Debug, Json
from trapetum.cli.output import emit, fields, human_bytes

__all__ = ["env"]


def env(json: Json = False, debug: Debug = False) -> None:
    """Describe this machine and installation."""
    from trapetum.runtime.environment import describe_environment

    facts = describe_environment()
    emit(facts, lambda: _text(facts), as_json=json)


def _text(facts: dict[str, Any]) -> str:
    cpu, memory = facts["cpu"], facts["memory"]
    cores = f"{cpu['usable']} usable of {cpu['cores']}"
    if cpu["quota"] is not None:
        cores += f", limited to {cpu['quota']:g}"
    return fields(
        {
            "trapetum": f"{facts['trapetum']} ({facts['location']})",
            "python": f"{facts['python']} {facts['executable']}",
            "platform": facts["platform"],
            "cpu": cpu["model"],
            "features": " ".join(cpu["features"]) or "none known",
            "cores": cores,
            "memory": ", ".join(f"{human_bytes(v)} {k}" for k, v in memory.items() if v is not None)
            or "unknown",
            "blas": ", ".join(
                f"{b['library']} {b['version']} ({b['threads']} threads)" for b in facts["blas"]
            )
            or "none",
            **{name: version or "not installed" for name, version in facts["packages"].items()},
            "extras": ", ".join(f"{k} {'yes' if v else 'no'}" for k, v in facts["extras"].items()),
            **{f"{name} cache": path or "none writable" for name, path in facts["caches"].items()},
        }
    )
