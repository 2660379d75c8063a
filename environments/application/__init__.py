"""Stateful services behind tools: a declared application, its database for one episode, replay, and business rules."""
