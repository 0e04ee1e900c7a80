"""The fault campaign: real services, real streams, and faults that must cost nothing but a pause."""
