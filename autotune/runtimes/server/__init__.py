"""Engines that are servers of their own: processes, readiness, HTTP, failures. One module an engine on top."""
