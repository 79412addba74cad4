"""Fast forms of the package's arithmetic; `attention` picks among them. Nothing here is imported by `import visionpos`."""
