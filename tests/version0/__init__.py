"""Version 0 of Orbax's interface, beside genuine Orbax."""
