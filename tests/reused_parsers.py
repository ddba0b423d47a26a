"""tyro's parsers, built once in a process: 40 ms each, and the tests parse flags a thousand times.

A user's process parses once or twice. What a class of flags is parsed by does not change.
"""

from typing import Any

from tyro import _parsers


def install() -> None:
    """Have tyro build the parser of each class of flags once."""
    build = _parsers.ParserSpecification.from_callable_or_type
    built: dict[Any, Any] = {}

    def built_once(flags_class: Any, *args: Any, **how: Any) -> Any:
        if how.get("intern_prefix") or how.get("extern_prefix") or how.get("parent_classes"):
            return build(flags_class, *args, **how)  # of a group within a class
        if flags_class not in built:
            built[flags_class] = build(flags_class, *args, **how)
        return built[flags_class]

    _parsers.ParserSpecification.from_callable_or_type = staticmethod(built_once)
