"""Single HTTP questions to servers, with keys and limits; measured requests have a transport of their own."""
