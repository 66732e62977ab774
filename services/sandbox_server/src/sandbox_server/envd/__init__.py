"""The API of one sandbox: what runs as `envd` inside a real one."""
