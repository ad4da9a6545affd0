"""Processes that run functions of users and can be killed. Workers import it: nothing else here."""
