"""The two exceptions of the package: what a caller can catch, and nothing else."""


class PositionError(ValueError):
    """Raised when a value, shape, grid or file cannot give a right position.

    The message names the argument, its value, the constraint and the remedy.
    """


class ConfigError(PositionError):
    """Raised when a YAML file, a spec or an override is not valid."""
