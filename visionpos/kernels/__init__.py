"""Fast forms of the package's arithmetic, among which `attention` picks."""
