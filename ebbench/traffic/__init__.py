"""When requests are sent: scenarios, arrival processes, phases."""
