"""Makes `python -m openenv_server` the same as `twinkle-openenv-server`."""

from openenv_server.cli import main

main()
