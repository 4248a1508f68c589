"""What an operator has of a running application: the admin API and the live page."""
