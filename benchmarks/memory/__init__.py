"""The memory tier against the disk: saves, recoveries, and what saving costs a program that trains."""
