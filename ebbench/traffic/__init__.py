"""When requests are asked: scenarios, arrival processes, phases."""
