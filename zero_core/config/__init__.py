"""What the engine and a run can be told: frozen dataclasses without torch."""
