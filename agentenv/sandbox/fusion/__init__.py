"""SandboxFusion's HTTP API: a client for its servers, and a server for its clients."""
