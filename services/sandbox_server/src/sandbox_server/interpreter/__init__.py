"""The code interpreter of a sandbox, as the SDKs of E2B ask for it on its port 49999."""
