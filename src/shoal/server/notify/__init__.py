"""Notifications: signed webhooks and Slack messages about the events of a user's jobs."""
