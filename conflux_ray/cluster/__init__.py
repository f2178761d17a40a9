"""What Ray owns of an XP instance: its workers, its placement, its registration, its life and death."""
