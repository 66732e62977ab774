"""Makes `python -m sandbox_server` the same as `twinkle-sandbox-server`."""

from sandbox_server.cli import main

main()
