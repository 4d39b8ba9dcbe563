# What the errors carry beside their text (src/errors.cpp), for the type stubs.
_hoist.ConfigError.__suffix__:
    key: str
    problems: list[dict[str, str | int]]

_hoist.BudgetError.__suffix__:
    tier: str
    have_bytes: int
    need_bytes: int
    key: str
    detail: str

_hoist.IoError.__suffix__:
    operation: str
    filename: str
    offset_bytes: int
    length_bytes: int
    errno: int

_hoist.CorruptionError.__suffix__:
    unit: str
    region: str
    filename: str
    offset_bytes: int

_hoist.DeviceError.__suffix__:
    code: int
