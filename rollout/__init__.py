"""Prompts become conversations: data, chat templates, generation engines and simulated users."""
