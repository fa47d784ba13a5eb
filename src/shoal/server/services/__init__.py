"""The verbs and questions of the API: submit, cancel, why, what-if, users."""
