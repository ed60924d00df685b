"""When requests are sent: scenarios, phases, arrival processes."""
