"""The engine loop, its clients, and what turns token ids into answers."""
