"""The sandbox over HTTP: a server, also for the clients of SandboxFusion, and its own client."""
