"""Makes `python -m twinkle_agentic.rollout.cli` the same as `twinkle-rollout`."""

from twinkle_agentic.rollout.cli import main

main()
