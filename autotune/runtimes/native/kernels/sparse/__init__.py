"""Absorbed attention that reads only the selected pools and the unfinished last one."""
